"""Lets our own engine write several texts at once, and notes when each token came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from foretell.engine.sequence_state import SequenceState
from foretell.llm import LLM
from foretell.types import Request


@dataclass(frozen=True)
class Course:
    """How texts were written. Times are seconds; `decoding` begins when the last of them has its first token."""

    tracks: tuple[SequenceState, ...]
    whole: float
    decoding: float
    early: int  # tokens that were there before
    pace: tuple[tuple[float, int], ...]  # then for each step and text: the step's seconds, the tokens it brought

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(track.seq.tokens[len(track.seq.request.prompt) :]) for track in self.tracks)

    @property
    def steps(self) -> int:
        """Forwards that gave a text a token, summed over texts."""
        return sum(track.speculation.steps for track in self.tracks)

    @property
    def timed(self) -> int:
        """Tokens that came while decoding was timed."""
        return sum(map(len, self.texts)) - self.early


def write(llm: LLM, requests: Sequence[Request]) -> Course:
    """Write all of them to their ends, from one batch; nobody else may be served meanwhile."""
    engine = llm.engine
    grammars = [request.params.structured_outputs for request in requests]
    compiled = [None if wanted is None else llm.assembly.grammars.compile(wanted) for wanted in grammars]
    began = perf_counter()
    try:
        tracks = [engine.add(request, grammar) for request, grammar in zip(requests, compiled, strict=True)]
        while any(track.timings.first_token is None for track in tracks):
            engine.step()
        first, early = perf_counter(), sum(track.seq.num_output_tokens for track in tracks)
        pace: list[tuple[float, int]] = []
        _drain(tracks)
        last = first
        while engine.busy:
            engine.step()
            now = perf_counter()
            pace += [(now - last, count) for count in _drain(tracks) if count]
            last = now
    finally:
        for request in requests:  # where all went well there is nothing left to abort
            engine.abort(request.id)
    return Course(tuple(tracks), last - began, last - first, early, tuple(pace))


def _drain(tracks: Sequence[SequenceState]) -> list[int]:
    """The tokens each text got since it was last asked."""
    counts: list[int] = []
    for track in tracks:
        counts.append(sum(len(delta.tokens) for delta in track.outbox))
        track.outbox.clear()
    return counts
