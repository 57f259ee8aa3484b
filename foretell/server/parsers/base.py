"""Reading an answer for what it holds: words, thoughts, calls of tools. How the answer was cut never matters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

PartKind = Literal["content", "reasoning", "call", "arguments"]
ParseLoop = Generator[None, str, None]  # takes one character at a time, and "" for the end


@dataclass(frozen=True)
class OutputPart:
    """Something an answer says: words, thoughts, the name of a tool to call, or more of that call's arguments."""

    kind: PartKind
    text: str


class OutputParser(ABC):
    """Reads one character at a time, so that pieces of any size give the same."""

    def __init__(self) -> None:
        self.ended = False
        self._said: list[OutputPart] = []
        self._program = self.parse()
        next(self._program)

    @abstractmethod
    def parse(self) -> ParseLoop:
        """Takes characters by `yield` and says what they are."""

    def feed(self, text: str) -> list[OutputPart]:
        """What is certain now and was not before."""
        for char in text:
            self._program.send(char)
        return self._take()

    def finish(self) -> list[OutputPart]:
        """What is left at the end."""
        self.ended = True
        try:
            self._program.send("")
        except StopIteration:
            pass
        else:
            raise AssertionError("a program ends with its text")
        return self._take()

    def emit(self, kind: PartKind, text: str) -> None:
        """Add to what was said; a call begins anew each time."""
        last = self._said[-1] if self._said else None
        if last is not None and last.kind == kind and kind != "call":
            self._said[-1] = OutputPart(kind, last.text + text)
        elif text:
            self._said.append(OutputPart(kind, text))

    def _take(self) -> list[OutputPart]:
        said, self._said = self._said, []
        return said

    def parse_until(self, mark: str, kind: PartKind = "content", held: str = "") -> Generator[None, str, bool]:
        """Say all up to `mark`, less the blanks before it; False where the text ends first. `held` comes before."""
        while True:
            if held.endswith(mark):
                self.emit(kind, held[: -len(mark)].rstrip())
                return True
            certain = len(held) - overlap(held, mark)
            while certain and held[certain - 1].isspace():
                certain -= 1
            self.emit(kind, held[:certain])
            char = yield
            held = held[certain:] + char
            if not char:
                self.emit(kind, held)
                return False

    def expect(self, mark: str) -> Generator[None, str, bool]:
        """Pass over blanks and `mark`; anything else is said. False where the text ends."""
        held = ""
        while char := (yield):
            held += char
            found = held.lstrip()
            if found == mark:
                return True
            if not mark.startswith(found):
                self.emit("content", held)
                return True
        return False

    def emit_rest(self, kind: PartKind = "content") -> ParseLoop:
        """Say all that comes."""
        while char := (yield):
            self.emit(kind, char)


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
