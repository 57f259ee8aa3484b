"""What the engine keeps beside a sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from foretell.sampling.grammar_matcher import GrammarError, GrammarMatcher
from foretell.sampling.logits_processors import changes_logits
from foretell.types import Delta, Sequence, StepResult, TokenLogprob
from foretell.verify.rules import LOSSLESS

from .detokenizer import Detokenizer
from .stats import Speculation, origins


@dataclass
class Timings:
    """Seconds of one text by the wall clock: until it was taken up, until its first token, until its end."""

    added: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass
class SequenceState:
    """Of one text: its words, its grammar, its record, its clock."""

    seq: Sequence
    writer: Detokenizer
    matcher: GrammarMatcher | None = None
    speculation: Speculation = field(default_factory=Speculation)
    timings: Timings = field(default_factory=lambda: Timings(perf_counter()))
    cached_prompt_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place in the prompt
    error: str | None = None  # why the text could not go on
    outbox: deque[Delta] = field(default_factory=deque)  # what its caller has not taken yet
    untold: bool = False  # whether a step has written of which nothing was told yet
    patient: bool = False  # whether the caller waits for the end and need not hear of every step
    _stands_alone: bool = False

    @property
    def stands_alone(self) -> bool:
        """Whether the next token comes of its row of logits by the text's own settings, and nothing else is wanted of
        that row. Without a guess `match` draws as plain decoding does; rules of chance draw from noise of their own."""
        if not self._stands_alone:  # from some token on it stays so
            request, params = self.seq.request, self.seq.request.params
            self._stands_alone = (
                (request.rule == "match" or (params.temperature == 0 and request.rule in LOSSLESS))
                and params.logprobs is None
                and params.prompt_logprobs is None
                and not request.speculation.details
                and not changes_logits(request, self.seq.num_output_tokens)
            )
        return self._stands_alone

    def take(self, tokens: list[int]) -> tuple[int, ...]:
        """Let tokens into the text up to its end: an end token, a stop string, the limit or the grammar's end. Those
        that entered it; what they say is told with `note`."""
        if self.matcher is not None and self.error is None:
            try:
                tokens = tokens[: self.matcher.advance(tokens)]
            except GrammarError as error:  # other settings left nothing the grammar allows
                self.error = str(error)
        entered, self.seq.finish_reason = self.writer.take(tokens)
        if self.error is not None:
            self.seq.finish_reason = "error"
        elif self.seq.finish_reason is None and self.matcher is not None and self.matcher.finished:
            self.seq.finish_reason = "stop"
            self.writer.close()
        return tuple(tokens[:entered])

    def note(self, outcome: StepResult, skip: str) -> Delta:
        """A step has written: keep its record, and tell it. `skip`: why nothing was guessed, where that is known."""
        text = self.writer.tell()
        self.untold = False
        self.logprobs += outcome.logprobs or ()
        written_by = origins(outcome)
        self.speculation.observe(outcome, written_by)
        now, timings = perf_counter(), self.timings
        if timings.first_token is None:
            timings.first_token = now
        if self.seq.finish_reason is not None:
            timings.finished = now
        request, draft = self.seq.request, outcome.draft
        delta = Delta(
            request.id,
            request.choice,
            outcome.new_tokens,
            text,
            written_by,
            len(draft),
            outcome.logprobs,
            self.seq.finish_reason,
            skip,
            draft.source,
            outcome.details,
        )
        self.outbox.append(delta)
        return delta


class PendingDelta(NamedTuple):
    """What a step has written of one text, and nobody was told yet. `skip`: as in `SequenceState.note`."""

    track: SequenceState
    outcome: StepResult
    skip: str


def told(news: list[PendingDelta]) -> list[Delta]:
    """Tell all of it; then it is no news any more. A text of which nothing can be told keeps nobody else from hearing;
    what went wrong is raised behind all others."""
    deltas: list[Delta] = []
    failure: Exception | None = None
    for track, outcome, skip in news:
        try:
            deltas.append(track.note(outcome, skip))
        except Exception as error:
            failure = failure or error
    news.clear()
    if failure is not None:
        raise failure
    return deltas
