"""The loop: plan, draft, run, judge, commit, learn. Plain decoding is the same loop with empty drafts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from time import perf_counter

from foretell.control.controller import Controller
from foretell.draft.base import Drafter
from foretell.errors import CapacityError, RequestError
from foretell.runner.runner import ModelRunner, StepOutput
from foretell.sampling.sampling import Row, choose
from foretell.tokenizer import Tokenizer
from foretell.types import Delta, Draft, FinishReason, Outcome, Request, Sequence, Share, Verdict
from foretell.verify.match import walk

from .scheduler import Scheduler
from .stats import Speculation, Stats, origins
from .writer import Writer


@dataclass
class Timings:
    """Seconds of one text by the wall clock: until it was taken up, until its first token, until its end."""

    added: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass
class Track:
    """What the engine keeps beside a sequence: its words, its record, its clock."""

    seq: Sequence
    writer: Writer
    speculation: Speculation = field(default_factory=Speculation)
    timings: Timings = field(default_factory=lambda: Timings(perf_counter()))
    cached_prompt_tokens: int = 0


class Engine:
    """Writes many texts at once."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        controller: Controller,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.runner, self.drafter, self.controller, self.scheduler = runner, drafter, controller, scheduler
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.tracks: dict[int, Track] = {}
        self._ids = itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self.tracks)

    def add(self, request: Request) -> Track:
        """Take a request in; it is written from the next steps on."""
        self._check(request)
        seq = Sequence(next(self._ids), request, list(request.prompt))
        track = self.tracks[seq.id] = Track(seq, Writer(request, self.tokenizer))
        self.scheduler.add(seq)
        return track

    def _check(self, request: Request) -> None:
        vocab = self.runner.model.config.vocab
        if not request.prompt:
            raise RequestError("prompt", "is empty; give at least one token")
        if not all(0 <= token < vocab for token in request.prompt):
            raise RequestError("prompt", f"has token ids outside 0..{vocab - 1}")
        pool = self.runner.pool
        if pool.pages_for(len(request.prompt) + request.max_tokens) > pool.count:
            raise CapacityError(
                f"the text may need {len(request.prompt) + request.max_tokens} tokens of cache and there is room for "
                f"{pool.count * pool.page_size}; lower max_tokens or give more kv_memory"
            )

    def abort(self, request_id: str) -> list[Delta]:
        """End a request at once, all its choices; its pages are free when this returns."""
        tracks = [track for track in self.tracks.values() if track.seq.request.id == request_id]
        for track in tracks:
            track.seq.finish = "abort"
            self._leave(track)
        return [Delta(request_id, track.seq.request.choice, (), "", (), finish="abort") for track in tracks]

    def step(self) -> list[Delta]:
        """Run every planned sequence once; each that reached its end grows by at least one token."""
        plan = self.scheduler.plan(self.controller.budgets(self.scheduler.running))
        self._note_starts(plan)
        proposed = self.drafter.propose([share.seq for share in plan], [share.budget for share in plan])
        drafts = self.controller.trim(plan, proposed)
        output = self.runner.forward(plan, drafts)
        judged = [self.commit(outcome) for outcome in self.judge(plan, drafts, output)]
        outcomes = [outcome for outcome, _ in judged]
        for learner in (self.drafter, self.controller, self.stats):
            learner.observe(outcomes)
        # Only now: what drafters learn from may lie in these pages.
        for share in plan:
            self._settle(share.seq)
        return [delta for _, delta in judged if delta is not None]

    def judge(self, plan: list[Share], drafts: list[Draft], output: StepOutput) -> list[Outcome]:
        """What the target makes of each draft."""
        ends = [(share, draft) for share, draft in zip(plan, drafts, strict=True) if share.reaches_end]
        chosen = choose(output.logits, [row for share, draft in ends for row in _rows(share, draft)])
        outcomes, at, first = [], 0, 0
        for share, draft in zip(plan, drafts, strict=True):
            tokens: tuple[int, ...] = ()
            verdict: Verdict | None = None
            if share.reaches_end:
                tokens = tuple(chosen[at : at + 1 + len(draft)])
                verdict = walk(draft, tokens)
                at += len(tokens)
            rows = share.take + len(draft)
            features = None if output.features is None else output.features[first : first + rows]
            first += rows
            outcomes.append(Outcome(share, draft, verdict, tokens, (), features))
        return outcomes

    def commit(self, outcome: Outcome) -> tuple[Outcome, Delta | None]:
        """Let what was accepted enter the text. The only place where a sequence grows."""
        share, verdict = outcome.share, outcome.verdict
        seq = share.seq
        if verdict is None:
            seq.cached += share.take
            return outcome, None
        self.runner.keep(seq, share.length - 1, verdict.path)
        track = self.tracks[seq.id]
        accepted = [outcome.draft.tokens[node] for node in verdict.path]
        written = track.writer.write([*accepted, verdict.next_token])
        kept = (*accepted, verdict.next_token)[: written.count]
        seq.tokens += kept
        seq.cached = min(share.length + len(verdict.path), len(seq.tokens) - 1)
        seq.finish = written.finish
        outcome = Outcome(share, outcome.draft, verdict, outcome.chosen, kept, outcome.features)
        track.speculation.observe(outcome)
        self._note_tokens(track)
        return outcome, self._delta(seq, outcome, written.text)

    def _delta(self, seq: Sequence, outcome: Outcome, text: str) -> Delta:
        request = seq.request
        return Delta(request.id, request.choice, outcome.kept, text, origins(outcome), len(outcome.draft), seq.finish)

    def _settle(self, seq: Sequence) -> None:
        self.scheduler.settle(seq)
        if seq.finish is not None:
            self._leave(self.tracks[seq.id])

    def _leave(self, track: Track) -> None:
        self.scheduler.remove(track.seq)
        self.drafter.forget(track.seq)
        del self.tracks[track.seq.id]

    def _note_starts(self, plan: list[Share]) -> None:
        for share in plan:
            track = self.tracks[share.seq.id]
            if track.timings.started is None:
                track.timings.started = perf_counter()
                track.cached_prompt_tokens = share.start
                self.stats.cached_prompt_tokens += share.start

    def _note_tokens(self, track: Track) -> None:
        now = perf_counter()
        if track.timings.first_token is None:
            track.timings.first_token = now
        if track.seq.finish is not None:
            track.timings.finished = now


def _rows(share: Share, draft: Draft) -> list[Row]:
    """What decides the token after the sequence's last one and after each node of its draft."""
    request = share.seq.request
    positions = [share.length, *(share.length + depth for depth in draft.depths())]
    return [Row(request.params, request.seed, position) for position in positions]


__all__ = ["Engine", "FinishReason", "Timings", "Track"]
