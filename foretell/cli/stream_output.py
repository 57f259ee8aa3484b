"""Text for a terminal, in which each token is coloured by who proposed it: the colours of the page, in its order."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from foretell.types import TARGET, Delta

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.tokenizer import Tokenizer

COLOURS = tuple(f"\x1b[{code}m" for code in (36, 33, 35, 91, 94, 32, 95))
RESET = "\x1b[0m"
# What a terminal would obey: shown by its picture. Line ends and tabs are text.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def wants_colour(stream: TextIO | None = None) -> bool:
    """Whether colours are welcome there, or on standard output."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Palette:
    """A colour for each drafter, by the order in which they are met; none for the target."""

    def __init__(self, drafters: Iterable[str] = ()) -> None:
        self._places: dict[str, int] = {}
        for name in drafters:
            self.paint("", name)

    def paint(self, text: str, drafter: str) -> str:
        """The text in the drafter's colour."""
        if drafter == TARGET:
            return text
        place = self._places.setdefault(drafter, len(self._places))
        return f"{COLOURS[place % len(COLOURS)]}{text}{RESET}" if text else ""

    def legend(self, drafters: Iterable[str] | None = None) -> str:
        """Who has which colour, of those met or of these."""
        names = [self.paint(name, name) for name in (self._places if drafters is None else drafters)]
        return (
            f"{', '.join(names)}: guessed, and stood; plain: the model itself" if names else "plain: the model itself"
        )


class Tint:
    """Colours a stream of deltas. Text comes out when the engine gives it; a stop string may hold it back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        palette: Palette | None,
        prompt: Sequence[int] = (),
        *,
        skip_special: bool = True,
        terminal: bool = False,
    ) -> None:
        """Without a palette the text stays as it is; only that a `terminal` is not to obey it."""
        from foretell.tokenizer import StreamDecoder

        self.decoder = StreamDecoder(tokenizer, skip_special=skip_special, context=prompt[-8:])
        self.palette, self.terminal = palette, terminal
        self.met: dict[str, None] = {}  # the drafters whose tokens stood, in order
        self._owed: deque[tuple[str, str]] = deque()  # text of tokens seen but not yet given out, with their origins

    def render(self, delta: Delta) -> str:
        """The delta's text, coloured."""
        if self.palette is None:
            return self._shown(delta.text)
        for token, origin in zip(delta.tokens, delta.origins, strict=True):
            self._owed.append((self.decoder.push([token]), origin))
            if origin != TARGET:
                self.met.setdefault(origin)
        return "".join(self._painted(self.palette, delta.text))

    def _painted(self, palette: Palette, text: str) -> list[str]:
        pieces: list[str] = []
        at = 0
        while at < len(text) and self._owed:
            piece, origin = self._owed.popleft()
            if len(piece) > len(text) - at:
                self._owed.appendleft((piece[len(text) - at :], origin))
                piece = piece[: len(text) - at]
            pieces.append(palette.paint(self._shown(piece), origin))
            at += len(piece)
        return [*pieces, self._shown(text[at:])]

    def _shown(self, text: str) -> str:
        return text.translate(CONTROLS) if self.terminal else text

    def legend(self) -> str:
        """Who wrote what, for those whose tokens were coloured; empty without colours."""
        return "" if self.palette is None else self.palette.legend(self.met)


def tint_for(llm: LLM, prompt: Sequence[int], show: bool, *, skip_special: bool = True) -> Tint:
    """For an answer on standard output."""
    palette = Palette(llm.engine.drafter.drafters) if show and wants_colour() else None
    return Tint(llm.tokenizer, palette, prompt, skip_special=skip_special, terminal=sys.stdout.isatty())


def tell(tally: Tally, tint: Tint) -> None:
    """What an answer cost, and who has which colour, beside the text."""
    print(tally.summary(), file=sys.stderr)
    tell_colours(tint)


def tell_colours(tint: Tint) -> None:
    """Who has which colour, where there are any."""
    if (legend := tint.legend()) and wants_colour(sys.stderr):
        print(legend, file=sys.stderr)


@dataclass
class Tally:
    """One answer. A delta is a step of the target that gave it tokens."""

    began: float = field(default_factory=perf_counter)
    first: float | None = None
    last: float = 0.0
    steps: int = 0
    drafted: int = 0
    first_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Count one delta, now."""
        self.last = perf_counter()
        if self.first is None:
            self.first, self.first_tokens = self.last, len(delta.tokens)
        self.steps += 1
        self.drafted += delta.num_drafted
        self.tokens += delta.tokens
        self.origins += delta.origins
        self.text += delta.text
        self.finish = delta.finish_reason

    @property
    def accepted(self) -> int:
        return sum(origin != TARGET for origin in self.origins)

    @property
    def accepted_per_step(self) -> float:
        return len(self.tokens) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: from the first token on, that one not counted."""
        seconds = self.last - (self.first or self.last)
        return (len(self.tokens) - self.first_tokens) / seconds if seconds > 0 else 0.0

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{len(self.tokens)} tokens in {self.steps} steps ({self.accepted_per_step:.2f} a step, "
            f"{self.accepted} of {self.drafted} guesses accepted), {self.tokens_per_second:.1f} tokens/s, "
            f"first after {(self.first or self.began) - self.began:.2f} s"
        )
