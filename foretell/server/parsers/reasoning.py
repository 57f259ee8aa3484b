"""Thoughts apart from the answer, for models that think between <think> and </think>."""

from __future__ import annotations

from foretell.server.parsers.base import OutputParser, ParseLoop, PartKind

START_TAG, END_TAG = "<think>", "</think>"


class ReasoningParser(OutputParser):
    """`thinking`: whether the prompt ends inside a passage already, as some templates have it."""

    def __init__(self, thinking: bool) -> None:
        self.in_reasoning = thinking
        self._thought = False
        super().__init__()

    def parse(self) -> ParseLoop:
        held = ""
        while not self.in_reasoning:
            char = yield
            held += char
            found = held.lstrip()
            if found == START_TAG:
                break
            if not char or not START_TAG.startswith(found):
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
        """Thoughts begin with their first word."""
        if kind == "reasoning" and not self._thought:
            text = text.lstrip()
            self._thought = bool(text)
        super().emit(kind, text)


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt leaves a passage open for the model to go on with."""
    return prompt.rstrip().endswith(START_TAG)


def has_reasoning_tags(template: str | None) -> bool:
    """Whether a chat template knows of such passages."""
    return template is not None and END_TAG in template
