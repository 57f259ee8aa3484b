"""Separates reasoning between the tags of the model, such as <think> and </think>, from content."""

from __future__ import annotations

from foretell.server.parsers.base import OutputParser, ParseLoop, PartKind
from foretell.tokenizer.reasoning_tags import THINK, ReasoningTags


class ReasoningParser(OutputParser):
    """Parses an optional reasoning block at the start; `in_reasoning`: the prompt already ends inside one."""

    def __init__(self, in_reasoning: bool, tags: ReasoningTags = THINK) -> None:
        self.in_reasoning, self.tags = in_reasoning, tags
        self._has_reasoning = False
        super().__init__()

    def parse(self) -> ParseLoop:
        held = ""
        while not self.in_reasoning:
            char = yield
            held += char
            stripped = held.lstrip()
            if stripped == self.tags.start:
                break
            if not char or not self.tags.start.startswith(stripped):
                self.emit("content", held)
                if char:
                    yield from self.emit_rest()
                return
        if (yield from self.parse_until(self.tags.end, kind="reasoning")):
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


def ends_in_reasoning(prompt: str, tags: ReasoningTags = THINK) -> bool:
    """Return whether a prompt ends with an open reasoning block."""
    return prompt.rstrip().endswith(tags.start)
