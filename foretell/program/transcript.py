"""What a state says, piece by piece, for readers in other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Some text; `name` is whose, where it has one, and `last` says that this is all of that."""

    text: str
    name: str | None = None
    last: bool = False


class Transcript:
    """Grows until it is closed, with the error that ended it where there was one."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None

    def write(self, piece: Piece) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def close(self, error: Exception | None = None) -> None:
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    def read(self, name: str | None = None) -> Iterator[str]:
        """All of it as it comes, or what was written under one name."""
        place = 0
        while new := self._behind(place):
            place += len(new)
            for piece in new:
                if piece.text and name in (None, piece.name):
                    yield piece.text
                if piece.last and name is not None and piece.name == name:
                    return
        if self._error is not None:
            raise self._error

    def _behind(self, place: int) -> list[Piece]:
        """What comes from a place on, as soon as there is some; nothing when that will never be."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pieces) > place or self._closed)
            return self._pieces[place:]
