"""The engine's state of each sequence: text, grammar, statistics, and deltas that were not emitted yet."""

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
from .stats import SpeculationStats, token_origins


@dataclass
class SequenceTimestamps:
    """Times at which a sequence was added, scheduled, got its first token and finished; `perf_counter` seconds."""

    added: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass
class SequenceState:
    """The engine's state of one sequence."""

    seq: Sequence
    detokenizer: Detokenizer
    matcher: GrammarMatcher | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    timings: SequenceTimestamps = field(default_factory=lambda: SequenceTimestamps(perf_counter()))
    cached_prompt_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position in the prompt
    error: str | None = None  # why the sequence cannot continue
    outbox: deque[Delta] = field(default_factory=deque)  # deltas that the caller has not taken yet
    has_pending_delta: bool = False  # tokens were committed whose delta is not emitted yet
    wants_deltas: bool = True  # False: the caller waits for the end and need not be woken for every step
    _can_sample_on_device: bool = False

    @property
    def can_sample_on_device(self) -> bool:
        """Return whether the next token depends only on its logits row and nothing else is wanted from that row.

        Then the device can sample it and go on before the host has seen it. Without a draft, `match` samples as plain
        decoding does; other rules at a temperature above 0 use noise of their own.
        """
        if not self._can_sample_on_device:  # once true it stays true
            request, params = self.seq.request, self.seq.request.params
            self._can_sample_on_device = (
                (request.rule == "match" or (params.temperature == 0 and request.rule in LOSSLESS))
                and params.logprobs is None
                and params.prompt_logprobs is None
                and not request.speculation.details
                and not changes_logits(request, self.seq.num_output_tokens)
            )
        return self._can_sample_on_device

    def append(self, tokens: list[int]) -> tuple[int, ...]:
        """Append tokens up to the end of the sequence and return those that were appended.

        The end is a stop token, a stop string, `max_tokens` or the end of the grammar. `make_delta` follows.
        """
        if self.matcher is not None and self.error is None:
            try:
                tokens = tokens[: self.matcher.advance(tokens)]
            except GrammarError as error:  # other sampling parameters left no token that the grammar allows
                self.error = str(error)
        num_appended, self.seq.finish_reason = self.detokenizer.append(tokens)
        if self.error is not None:
            self.seq.finish_reason = "error"
        elif self.seq.finish_reason is None and self.matcher is not None and self.matcher.finished:
            self.seq.finish_reason = "stop"
            self.detokenizer.finish()
        return tuple(tokens[:num_appended])

    def make_delta(self, result: StepResult, skip_reason: str) -> Delta:
        """Update the statistics with a step and queue its delta. `skip_reason`: why nothing was drafted, if known."""
        text = self.detokenizer.pop_text()
        self.has_pending_delta = False
        self.logprobs += result.logprobs or ()
        origins = token_origins(result)
        self.speculation.observe(result, origins)
        now, timings = perf_counter(), self.timings
        if timings.first_token is None:
            timings.first_token = now
        if self.seq.finish_reason is not None:
            timings.finished = now
        request, draft = self.seq.request, result.draft
        delta = Delta(
            request_id=request.id,
            choice=request.choice,
            tokens=result.new_tokens,
            text=text,
            origins=origins,
            num_drafted=len(draft),
            logprobs=result.logprobs,
            finish_reason=self.seq.finish_reason,
            skip_reason=skip_reason,
            drafter=draft.source,
            details=result.details,
        )
        self.outbox.append(delta)
        return delta


class PendingDelta(NamedTuple):
    """A committed step of one sequence whose delta is not emitted yet."""

    state: SequenceState
    result: StepResult
    skip_reason: str  # as in `SequenceState.make_delta`


def flush(pending: list[PendingDelta]) -> list[Delta]:
    """Emit one delta per sequence and clear `pending`. If one fails, emit the others first, then raise."""
    deltas: list[Delta] = []
    failure: Exception | None = None
    for state, result, skip_reason in pending:
        try:
            deltas.append(state.make_delta(result, skip_reason))
        except Exception as error:
            failure = failure or error
    pending.clear()
    if failure is not None:
        raise failure
    return deltas
