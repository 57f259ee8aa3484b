"""The loop: plan, draft, run, judge, commit, learn. Plain decoding is the same loop with empty drafts."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from time import perf_counter

from foretell.control.controller import Controller
from foretell.draft.base import Drafter
from foretell.errors import CapacityError
from foretell.kv.shortage import lacks_memory
from foretell.runner.cuda.graphs import TimingGuard, note_odd
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.grammar import Grammar
from foretell.sampling.grammar_matcher import GrammarError
from foretell.tokenizer import Tokenizer
from foretell.types import (
    NO_DRAFT,
    Budget,
    Delta,
    Draft,
    Request,
    ScheduledSequence,
    Sequence,
    StepResult,
    StepTimes,
)

from .async_step import InFlightStep, StepTimer, draws_of, followers, may_stay_unseen, next_shares
from .detokenizer import Detokenizer
from .draft_guard import SafeDrafter, constrain
from .oom_backoff import OomBackoff
from .scheduler import Scheduler
from .sequence_state import PendingDelta, SequenceState, told
from .stats import Speculation, Stats
from .verifier import SequenceVerifier, Verifier

LOG = logging.getLogger("foretell")


class Engine:
    """Writes many texts at once."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        controller: Controller,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        judge: SequenceVerifier | None = None,
    ) -> None:
        self.runner, self.controller, self.scheduler = runner, controller, scheduler
        self.tokenizer, self.judge = tokenizer, judge or SequenceVerifier()
        self.stats = Stats()
        self.tracks: dict[int, SequenceState] = {}
        self._ids = itertools.count()
        self.guard = SafeDrafter(drafter, runner.model.config.vocab)
        self.relief = OomBackoff(scheduler)
        self._ahead: InFlightStep | None = None  # a step that was begun and not ended
        self._clock, self.court = StepTimer(), Verifier(self)

    @property
    def drafter(self) -> Drafter:
        return self.guard.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        if drafter.taps:  # what it keeps beside the target's it has not kept yet: all texts are read anew
            self.scheduler.start_over()
        self._ahead = None  # nothing is lost: it writes the same once more
        self.guard = SafeDrafter(drafter, self.runner.model.config.vocab)

    @property
    def busy(self) -> bool:
        return bool(self.tracks)

    def add(self, request: Request, grammar: Grammar | None = None) -> SequenceState:
        """Take a request in; it is written from the next steps on. `grammar` is its `structured_outputs`, compiled."""
        self.check(request)
        assert (grammar is None) == (request.params.structured_outputs is None), "a grammar comes compiled"
        seq = Sequence(next(self._ids), request, list(request.prompt))
        writer = Detokenizer(request, self.tokenizer)
        matcher = None if grammar is None else grammar.matcher(writer.ends)
        track = self.tracks[seq.id] = SequenceState(seq, writer, matcher, Speculation(rule=request.rule))
        self.scheduler.add(seq)
        return track

    def check(self, request: Request) -> None:
        """Refuse a request that could never be written here."""
        pool = self.runner.pool
        if pool.pages_for(len(request.prompt) + request.max_tokens) > pool.count:
            raise CapacityError(
                f"the text may need {len(request.prompt) + request.max_tokens} tokens of cache and there is room for "
                f"{pool.count * pool.page_size}; lower max_tokens or give more kv_memory"
            )

    def plain_seconds(self, batch: int, context: int) -> float | None:
        """What a step without drafts takes for `batch` texts with `context` tokens cached in all, if that is known."""
        return self.controller.plain_seconds(batch, context)

    def abort(self, request_id: str) -> list[Delta]:
        """End a request at once, all its choices; its pages are free when this returns."""
        tracks = [track for track in self.tracks.values() if track.seq.request.id == request_id]
        for track in tracks:
            track.seq.finish = "abort"
            self._leave(track)
        return [Delta(request_id, track.seq.request.choice, (), "", (), finish="abort") for track in tracks]

    def step(self) -> list[Delta]:
        """Run every planned sequence once; each that reached its end grows by at least one token."""
        self._clock.enter()
        try:
            with TimingGuard() as watch:
                return self._step(watch)
        finally:
            self._clock.leave()

    def _step(self, watch: TimingGuard) -> list[Delta]:
        flight, self._ahead = self._ahead, None  # what fails in here leaves nothing behind that is half done
        if flight is None or flight.moment != self._moment or not any(map(self.lives, flight.plan)):
            flight = self._begin()
            if flight is None:
                return []
        goes_ahead = self.runner.goes_ahead
        try:
            ahead = None
            if goes_ahead:
                ahead = self._send_ahead(flight)
                self._prepare(flight)
            outcomes, curious = self.court(flight)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            self._shed([share for share in flight.plan if self.lives(share)], error)
            return []
        if self.runner.followers is not None:
            self.runner.followers.check()
        flight.odd |= watch.odd
        return self._write(flight, outcomes, curious, ahead)

    def _write(
        self, flight: InFlightStep, outcomes: list[StepResult], curious: float, ahead: InFlightStep | None
    ) -> list[Delta]:
        """Let what came of a step into the texts, learn from it, and tell it: behind the beginning of the next step
        where a device has nothing to do until then. `ahead` is a step that was sent before."""
        clock, goes_ahead = self._clock, self.runner.goes_ahead
        news: list[PendingDelta] = []
        deltas: list[Delta] = []
        try:
            outcomes = [self.commit(outcome, news) for outcome in outcomes]
            if not goes_ahead:
                deltas += told(news)
            self.relief.went_well()
            times = clock.beside(flight, curious) if goes_ahead else clock.apart(flight, curious)
            self._finish(outcomes, times)
            if goes_ahead and ahead is None and self._may_begin_next(flight):
                ahead = self._begin_next()
        finally:
            deltas += told(news)
        self.stats.observe(outcomes, times)
        self._ahead = ahead if self.tracks else None
        return deltas

    def _may_begin_next(self, flight: InFlightStep) -> bool:
        """Not behind somebody's first words, which would wait for guesses."""
        return bool(self.tracks) and self.controller.lets_next_begin and not flight.brings_first_words

    def _begin(self) -> InFlightStep | None:
        """Plan a step, guess, and give it to the device; None: there is nothing to do, or too little memory for it, and
        less is planned from now on."""
        began = perf_counter()
        plan = self.scheduler.plan(self._budgets(self.scheduler.running))
        if not plan:
            return None
        try:
            return self._launch(plan, began)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            self._shed(plan, error)
            return None

    def _begin_next(self) -> InFlightStep | None:
        """The next step, begun as soon as it is known what this one wrote: that is told while the device works. What
        fails here is nothing of this step's; it is tried again when the next one is asked for, and fails there."""
        try:
            with TimingGuard() as watch:
                flight = self._begin()
        except Exception:
            LOG.warning("a step could not begin early; it is tried again when it is asked for", exc_info=True)
            return None
        if flight is not None:
            flight.odd = watch.odd
        return flight

    def _launch(self, plan: list[ScheduledSequence], began: float) -> InFlightStep:
        """Guess, and give the step to the device."""
        self._note_starts(plan)
        planned = perf_counter()
        proposed = self._propose(plan)
        proposing = perf_counter() - planned
        trimmed = self.controller.trim(plan, proposed)
        drafts = [self._constrain(share, draft) for share, draft in zip(plan, trimmed, strict=True)]
        drafted = perf_counter()
        output = self.runner.forward(plan, drafts)
        # Several passes begin while the host still sends the next.
        launched = drafted if output.likeliest is None else perf_counter()
        return InFlightStep(plan, drafts, output, began, drafted, launched, proposing, self._clock.away, self._moment)

    def _prepare(self, flight: InFlightStep) -> None:
        """While a device reads new texts, let drafters read them, too."""
        first = [share.seq for share in flight.plan if share.reaches_end and not share.seq.written]
        new = [seq for seq in first if seq.request.drafters and seq.id in self.tracks]
        if new:
            began = perf_counter()
            self.guard.prepare(new)
            self._clock.away += perf_counter() - began  # the device may have long been done

    @property
    def _moment(self) -> tuple[int, int]:
        """What a step that was sent ahead does not outlive: what it is behind is lost, or lies on other pages."""
        return self.runner.steps if self.runner.goes_ahead else 0, self.scheduler.preemptions

    def _send_ahead(self, flight: InFlightStep) -> InFlightStep | None:
        """The step behind this one, begun before this one's tokens are known, where it will guess nothing; a text whose
        end they bring is in it for nothing."""
        running = self.scheduler.running
        stays = not flight.is_ahead or self._stays_plain(running)
        if not stays or not self.controller.rests(running):
            return None
        rows = followers(flight, self.scheduler, self.lives, self._is_alone)
        shares = next_shares(flight, rows)
        if not shares or not all(self.runner.reserve(share.seq, share.length) for share in shares):
            return None
        wants = any(map(self.court.wants_top, flight.plan, flight.drafts)) if self.drafter.wants_top else False
        began = perf_counter()
        with TimingGuard() as watch:
            sent = self.runner.ahead(shares, rows, draws_of(flight), self.drafter.wants_top if wants else 0)
        if watch.odd:  # so is the step that it kept the host from
            note_odd()
        if sent is None:
            return None
        flight.landed = sent.landed
        times = began, began, perf_counter()
        none = [NO_DRAFT] * len(shares)
        return InFlightStep(shares, none, sent.output, *times, moment=self._moment, is_ahead=True, odd=watch.odd)

    def _stays_plain(self, running: list[Sequence]) -> bool:
        """A look at texts whose step runs already. What it finds cannot help that step, and costs no time either."""
        asked, nodes = self.controller.asks(running)
        return self.controller.stays_plain(running, self.guard.offers(asked, nodes))

    def _is_alone(self, share: ScheduledSequence) -> bool:
        return self.tracks[share.seq.id].stands_alone

    def lives(self, share: ScheduledSequence) -> bool:
        """Whether its text still stands where the step was planned for: one that was sent ahead may have ended since,
        or had to leave its pages."""
        return share.seq.id in self.tracks and share.seq.cached == share.start

    def _finish(self, outcomes: list[StepResult], times: StepTimes) -> None:
        """All that is written: let others learn from it, and give back what is not needed."""
        if not times.odd:
            self.scheduler.learn([outcome.share for outcome in outcomes], times.running)
        try:
            self._learn(outcomes, times)
        finally:  # only now: what drafters learn from may lie in these pages
            for outcome in outcomes:
                self.settle(outcome.share.seq)

    def _shed(self, plan: list[ScheduledSequence], error: Exception) -> None:
        """Nothing was written: the same texts go on in smaller steps."""
        self.relief.shed(plan, error)
        for share in plan:
            self.scheduler.settle(share.seq)

    def _budgets(self, running: list[Sequence]) -> list[Budget]:
        """Let the controller decide, with the free guesses before it that it wants to see."""
        asked, nodes = self.controller.asks(running)
        return self.controller.budgets(running, self.guard.offers(asked, nodes))

    def _propose(self, plan: list[ScheduledSequence]) -> list[Draft]:
        budgets = [self._asked(share) for share in plan]
        if self.runner.goes_ahead and may_stay_unseen(plan, budgets, self.drafter, str(self.runner.device)):
            free = [self.tracks[share.seq.id].matcher is None for share in plan]
            if all(free):  # a grammar looks at guesses
                budgets = [replace(budget, unseen=True) for budget in budgets]
        return self.guard.propose(plan, budgets)

    def _asked(self, share: ScheduledSequence) -> Budget:
        """What the drafter may guess. A budget that names nobody is room for what a grammar forces."""
        budget = share.budget
        nobody = budget.nodes and not budget.drafter and self.drafter.name
        return Budget() if nobody and self.tracks[share.seq.id].matcher is not None else budget

    def _learn(self, outcomes: list[StepResult], times: StepTimes) -> None:
        """The same outcomes for the controller, and for the drafter where it may learn from them."""
        self.guard.follow(outcomes)
        self.guard.observe([outcome for outcome in outcomes if self.controller.watches(outcome.share.seq)])
        self.stats.drafter_failures = self.guard.failures
        self.controller.observe(outcomes, times)

    def _constrain(self, share: ScheduledSequence, draft: Draft) -> Draft:
        """What a grammar forces is guessed for free; what it forbids takes along only what hangs below it."""
        matcher = self.tracks[share.seq.id].matcher
        if matcher is None:
            return draft
        try:
            return constrain(draft, matcher, share.budget)
        except GrammarError:  # if it is more than this guess, the text itself will say so
            return Draft()

    def commit(self, outcome: StepResult, news: list[PendingDelta]) -> StepResult:
        """Let what was accepted enter the text, and note that it is to be told. The only place where a sequence
        grows."""
        share, verdict = outcome.share, outcome.verdict
        seq = share.seq
        if verdict is None:
            seq.cached += share.take
            return outcome
        self.runner.keep(seq, share.length - 1, verdict.path)
        track, draft = self.tracks[seq.id], outcome.draft
        kept = track.take([*(draft.tokens[node] for node in verdict.path), verdict.next_token])
        seq.tokens += kept
        seq.cached = min(share.length + len(verdict.path), len(seq.tokens) - 1)
        outcome, track.untold = outcome.with_kept(kept), True
        news.append(PendingDelta(track, outcome, "" if len(draft) else self.controller.why(seq)))
        return outcome

    def settle(self, seq: Sequence) -> None:
        """A step is over for a sequence: give back what it does not need, all of it where it has ended."""
        self.scheduler.settle(seq)
        if seq.finish is not None:
            self._leave(self.tracks[seq.id])

    def _leave(self, track: SequenceState) -> None:
        del self.tracks[track.seq.id]
        self.scheduler.remove(track.seq)
        self.controller.forget(track.seq)
        self.guard.forget(track.seq)
        if not self.tracks:
            self._ahead = None
            self._clock.rest()
        self.stats.drafter_failures = self.guard.failures

    def _note_starts(self, plan: list[ScheduledSequence]) -> None:
        for share in plan:
            track = self.tracks[share.seq.id]
            if track.timings.started is None:
                track.timings.started = perf_counter()
                track.cached_prompt_tokens = share.start
                self.stats.cached_prompt_tokens += share.start
