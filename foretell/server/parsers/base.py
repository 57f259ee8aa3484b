"""Incremental parsers of model output. The result does not depend on how the text is split into chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

PartKind = Literal["content", "reasoning", "call", "arguments"]
ParseLoop = Generator[None, str, None]  # receives one character at a time, "" at the end


@dataclass(frozen=True)
class OutputPart:
    """A parsed part of the output: content, reasoning, the function name of a tool call, or more of its arguments."""

    kind: PartKind
    text: str


class OutputParser(ABC):
    """A parser written as a generator over characters."""

    def __init__(self) -> None:
        self.ended = False
        self.blank = ""  # the whitespace before the last tag
        self._parts: list[OutputPart] = []
        self._loop = self.parse()
        next(self._loop)

    @abstractmethod
    def parse(self) -> ParseLoop:
        """Receive characters by `yield` and call `emit` for what they mean."""

    def feed(self, text: str) -> list[OutputPart]:
        """Parse more text; return the parts that are certain now."""
        for char in text:
            self._loop.send(char)
        return self._take()

    def finish(self) -> list[OutputPart]:
        """End the text; return the parts that were held back."""
        self.ended = True
        try:
            self._loop.send("")
        except StopIteration:
            pass
        else:
            raise AssertionError("a parse loop must end with its text")
        return self._take()

    def emit(self, kind: PartKind, text: str) -> None:
        """Append text to the last part if it is of the same kind; a `call` always starts a new part."""
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == kind and kind != "call":
            self._parts[-1] = OutputPart(kind, last.text + text)
        elif text:
            self._parts.append(OutputPart(kind, text))

    def _take(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return parts

    def parse_until(self, *tags: str, kind: PartKind = "content", held: str = "") -> Generator[None, str, str | None]:
        """Emit text up to the first of the tags, without the whitespace before it; return that tag, None at the end.

        `held` is text that was already received. The whitespace is `blank`, for tags that turn out to be content.
        """
        while True:
            found = next((tag for tag in tags if held.endswith(tag)), None)
            if found is not None:
                text = held[: -len(found)]
                self.blank = text[len(text.rstrip()) :]
                self.emit(kind, text.rstrip())
                return found
            certain = len(held) - max(overlap(held, tag) for tag in tags)
            while certain and held[certain - 1].isspace():
                certain -= 1
            self.emit(kind, held[:certain])
            char = yield
            held = held[certain:] + char
            if not char:
                self.emit(kind, held)
                return None

    def expect(self, tag: str) -> Generator[None, str, str | None]:
        """Skip whitespace and `tag`. Return the text received if another comes, None if the text ends."""
        held = ""
        while char := (yield):
            held += char
            stripped = held.lstrip()
            if stripped == tag:
                return ""
            if not tag.startswith(stripped):
                return held
        return None

    def emit_rest(self, kind: PartKind = "content") -> ParseLoop:
        """Emit all remaining text as parts of one kind."""
        while char := (yield):
            self.emit(kind, char)


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
