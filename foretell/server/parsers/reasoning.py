"""Separates reasoning between <think> and </think> from content."""

from __future__ import annotations

from foretell.server.parsers.base import OutputParser, ParseLoop, PartKind

START_TAG, END_TAG = "<think>", "</think>"


class ReasoningParser(OutputParser):
    """Parses an optional reasoning block at the start; `in_reasoning`: the prompt already ends inside one."""

    def __init__(self, in_reasoning: bool) -> None:
        self.in_reasoning = in_reasoning
        self._has_reasoning = False
        super().__init__()

    def parse(self) -> ParseLoop:
        held = ""
        while not self.in_reasoning:
            char = yield
            held += char
            stripped = held.lstrip()
            if stripped == START_TAG:
                break
            if not char or not START_TAG.startswith(stripped):
                self.emit("content", held)
                if char:
                    yield from self.emit_rest()
                return
        if (yield from self.parse_until(END_TAG, "reasoning")):
            while (char := (yield)) and char.isspace():
                pass
            if char:
                self.emit("content", char)
                yield from self.emit_rest()

    def emit(self, kind: PartKind, text: str) -> None:
        """Emit without whitespace at the start of the reasoning."""
        if kind == "reasoning" and not self._has_reasoning:
            text = text.lstrip()
            self._has_reasoning = bool(text)
        super().emit(kind, text)


def ends_in_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with an open reasoning block."""
    return prompt.rstrip().endswith(START_TAG)


def has_reasoning_tags(template: str | None) -> bool:
    """Return whether a chat template uses reasoning tags."""
    return template is not None and END_TAG in template
