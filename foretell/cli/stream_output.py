"""Streamed output in a terminal: statistics, and tokens styled by drafter, in the web page's order of drafters."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from foretell.sampling_params import DEFAULT_MAX_TOKENS
from foretell.types import TARGET, Delta

from .interrupts import catch_interrupts

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.sampling_params import SamplingParams
    from foretell.tokenizer import Tokenizer

# Accepted draft tokens are underlined; bold (1) and italic (3) tell drafters apart where colours do not. None is red.
COLOURS = tuple(f"\x1b[{code}m" for code in ("1;3;4;36", "1;4;33", "3;4;35", "4;94", "1;4;32", "3;4;95", "4;96"))
RESET = "\x1b[0m"
# Control characters are shown as symbols, so that a terminal does not execute them; newlines and tabs are kept.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Return a text without characters that a terminal would execute."""
    return text.translate(CONTROLS)


def wants_colour(stream: TextIO | None = None) -> bool:
    """Return whether a stream, by default standard output, shows colours."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Palette:
    """A style per drafter, assigned in order of first use; none for the target."""

    def __init__(self, drafters: Iterable[str] = ()) -> None:
        self._indices: dict[str, int] = {}
        for name in drafters:
            self.paint("", name)

    def paint(self, text: str, drafter: str) -> str:
        """Return the text in the drafter's colour."""
        if drafter == TARGET:
            return text
        index = self._indices.setdefault(drafter, len(self._indices))
        return f"{COLOURS[index % len(COLOURS)]}{text}{RESET}" if text else ""

    def legend(self, drafters: Iterable[str] | None = None) -> str:
        """Return a legend of all drafters used, or of these; empty without any."""
        names = [self.paint(name, name) for name in (self._indices if drafters is None else drafters)]
        return f"{', '.join(names)}: accepted draft tokens; no underline: the target" if names else ""


class StreamRenderer:
    """Renders a stream of deltas. Text appears when the engine returns it; a stop string may delay it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        palette: Palette | None,
        prompt: Sequence[int] = (),
        *,
        skip_special: bool = True,
        terminal: bool = False,
    ) -> None:
        """Without a palette the text has no colours; for a `terminal`, control characters are replaced."""
        from foretell.tokenizer import StreamDecoder

        self.decoder = StreamDecoder(tokenizer, skip_special=skip_special, context=prompt[-8:])
        self.palette, self.terminal = palette, terminal
        self.seen: dict[str, None] = {}  # drafters with accepted tokens, in order
        self._pending: deque[tuple[str, str]] = deque()  # text of tokens not yet rendered, with their origins

    def render(self, delta: Delta) -> str:
        """Return the delta's text, coloured."""
        if self.palette is None:
            return self._printable(delta.text)
        for token, origin in zip(delta.tokens, delta.origins, strict=True):
            self._pending.append((self.decoder.push([token]), origin))
            if origin != TARGET:
                self.seen.setdefault(origin)
        return "".join(self._painted(self.palette, delta.text))

    def _painted(self, palette: Palette, text: str) -> list[str]:
        chunks: list[tuple[str, str]] = []
        at = 0
        while at < len(text) and self._pending:
            chunk, origin = self._pending.popleft()
            if len(chunk) > len(text) - at:
                self._pending.appendleft((chunk[len(text) - at :], origin))
                chunk = chunk[: len(text) - at]
            chunks.append((self._printable(chunk), origin))
            at += len(chunk)
        runs = groupby(chunks, key=itemgetter(1))
        painted = [palette.paint("".join(chunk for chunk, _ in run), origin) for origin, run in runs]
        return [*painted, self._printable(text[at:])]

    def _printable(self, text: str) -> str:
        return printable(text) if self.terminal else text

    def legend(self) -> str:
        """Return the legend of the drafters seen; empty without any or without colours."""
        return "" if self.palette is None else self.palette.legend(self.seen)


def palette_of(llm: LLM) -> Palette:
    """Return the palette of all drafters of an engine, whether or not they draft by default."""
    return Palette(llm.engine.drafter.drafters)


def stream_renderer(llm: LLM, prompt: Sequence[int], show: bool, *, skip_special: bool = True) -> StreamRenderer:
    """Return a renderer for output on standard output."""
    palette = palette_of(llm) if show and wants_colour() else None
    return StreamRenderer(llm.tokenizer, palette, prompt, skip_special=skip_special, terminal=sys.stdout.isatty())


def print_stream(llm: LLM, prompt: list[int], params: SamplingParams, *, show: bool) -> StreamStats:
    """Print the output as it is generated, then statistics and the legend on standard error.

    Ctrl-C ends it and keeps what there is; the finish reason is then "abort".
    """
    renderer = stream_renderer(llm, prompt, show, skip_special=params.skip_special_tokens)
    stats = StreamStats()
    with catch_interrupts() as pressed, closing(llm.stream(prompt, params)) as stream:
        for delta in stream:
            stats.add(delta)
            print(renderer.render(delta), end="", flush=True)
            if pressed and delta.finish_reason is None:
                stats.finish = "abort"
                break
    print(flush=True)
    if cut := cut_note(stats.finish, len(stats.tokens), params.max_tokens or DEFAULT_MAX_TOKENS):
        print(cut, file=sys.stderr)
    print(stats.summary(), file=sys.stderr)
    print_legend(renderer)
    return stats


def cut_note(finish: str | None, tokens: int, max_tokens: int) -> str:
    """Return why an output of so many tokens is not complete; empty if it is."""
    if finish == "abort":
        return f"[stopped after {tokens} tokens]" if tokens else "[stopped]"
    if finish != "length":
        return ""
    if tokens < max_tokens:
        return f"[cut at {tokens} tokens: the context is full]"
    return f"[cut at {tokens} tokens; --max-tokens raises it]"


def print_legend(renderer: StreamRenderer) -> None:
    """Print the legend on standard error, if there are colours."""
    if (legend := renderer.legend()) and wants_colour(sys.stderr):
        print(legend, file=sys.stderr)


@dataclass
class StreamStats:
    """Statistics of one streamed output, whose deltas are one per step."""

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
        """Add a delta that arrived now."""
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
        """Return the decode speed: tokens after the first, per second."""
        seconds = self.last - (self.first or self.last)
        return (len(self.tokens) - self.first_tokens) / seconds if seconds > 0 else 0.0

    def summary(self) -> str:
        """Return one line with tokens, steps, acceptance and speed."""
        return (
            f"{len(self.tokens)} tokens in {self.steps} steps ({self.accepted_per_step:.2f} per step, "
            f"{self.accepted} of {self.drafted} draft tokens accepted), {self.tokens_per_second:.1f} tokens/s, "
            f"first token after {(self.first or self.began) - self.began:.2f} s"
        )
