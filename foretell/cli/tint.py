"""Text in which each token is coloured by who proposed it."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO

from foretell.types import TARGET, Delta

if TYPE_CHECKING:
    from foretell.tokenizer import Tokenizer

GREEN, RESET = "\x1b[32m", "\x1b[0m"
LEGEND = f"{GREEN}green{RESET}: guessed by the drafter and accepted; plain: written by the target"


def wants_colour(stream: TextIO = sys.stdout) -> bool:
    """Whether colours are welcome there."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Tint:
    """Colours a stream of deltas. Text comes out when the engine gives it; a stop string may hold it back."""

    def __init__(self, tokenizer: Tokenizer, colour: bool) -> None:
        from foretell.tokenizer import StreamDecoder

        self.decoder, self.colour = StreamDecoder(tokenizer), colour
        self._owed: deque[tuple[str, str]] = deque()  # text of tokens seen but not yet given out, with their origins

    def render(self, delta: Delta) -> str:
        """The delta's text, coloured."""
        if not self.colour:
            return delta.text
        for token, origin in zip(delta.tokens, delta.origins, strict=True):
            self._owed.append((self.decoder.push([token]), origin))
        return "".join(self._painted(len(delta.text), delta.text))

    def _painted(self, length: int, text: str) -> list[str]:
        pieces: list[str] = []
        at = 0
        while at < length and self._owed:
            piece, origin = self._owed.popleft()
            if len(piece) > length - at:
                self._owed.appendleft((piece[length - at :], origin))
                piece = piece[: length - at]
            pieces.append(piece if origin == TARGET or not piece else f"{GREEN}{piece}{RESET}")
            at += len(piece)
        return [*pieces, text[at:]]
