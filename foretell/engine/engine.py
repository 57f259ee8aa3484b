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
from foretell.runner.cuda.graphs import TimingGuard, mark_outlier
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
        self.tokenizer, self.sequence_verifier = tokenizer, judge or SequenceVerifier()
        self.stats = Stats()
        self.states: dict[int, SequenceState] = {}
        self._ids = itertools.count()
        self.safe_drafter = SafeDrafter(drafter, runner.model.config.vocab)
        self.oom_backoff = OomBackoff(scheduler)
        self._ahead: InFlightStep | None = None  # a step that was begun and not ended
        self._clock, self.verifier = StepTimer(), Verifier(self)

    @property
    def drafter(self) -> Drafter:
        return self.safe_drafter.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        if drafter.hidden_layers:  # what it keeps beside the target's it has not kept yet: all texts are read anew
            self.scheduler.recompute_all()
        self._ahead = None  # nothing is lost: it writes the same once more
        self.safe_drafter = SafeDrafter(drafter, self.runner.model.config.vocab)

    @property
    def busy(self) -> bool:
        return bool(self.states)

    def add(self, request: Request, grammar: Grammar | None = None) -> SequenceState:
        """Take a request in; it is written from the next steps on. `grammar` is its `structured_outputs`, compiled."""
        self.check(request)
        assert (grammar is None) == (request.params.structured_outputs is None), "a grammar comes compiled"
        seq = Sequence(next(self._ids), request, list(request.prompt))
        writer = Detokenizer(request, self.tokenizer)
        matcher = None if grammar is None else grammar.matcher(writer.ends)
        track = self.states[seq.id] = SequenceState(seq, writer, matcher, Speculation(rule=request.rule))
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
        tracks = [track for track in self.states.values() if track.seq.request.id == request_id]
        for track in tracks:
            track.seq.finish_reason = "abort"
            self._leave(track)
        return [Delta(request_id, track.seq.request.choice, (), "", (), finish_reason="abort") for track in tracks]

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
        goes_ahead = self.runner.supports_async
        try:
            ahead = None
            if goes_ahead:
                ahead = self._send_ahead(flight)
                self._prepare(flight)
            outcomes, curious = self.verifier(flight)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            self._shed([share for share in flight.plan if self.lives(share)], error)
            return []
        if self.runner.workers is not None:
            self.runner.workers.check()
        flight.odd |= watch.is_outlier
        return self._write(flight, outcomes, curious, ahead)

    def _write(
        self, flight: InFlightStep, outcomes: list[StepResult], curious: float, ahead: InFlightStep | None
    ) -> list[Delta]:
        """Let what came of a step into the texts, learn from it, and tell it: behind the beginning of the next step
        where a device has nothing to do until then. `ahead` is a step that was sent before."""
        clock, goes_ahead = self._clock, self.runner.supports_async
        news: list[PendingDelta] = []
        deltas: list[Delta] = []
        try:
            outcomes = [self.commit(outcome, news) for outcome in outcomes]
            if not goes_ahead:
                deltas += told(news)
            self.oom_backoff.went_well()
            times = clock.beside(flight, curious) if goes_ahead else clock.apart(flight, curious)
            self._finish(outcomes, times)
            if goes_ahead and ahead is None and self._may_begin_next(flight):
                ahead = self._begin_next()
        finally:
            deltas += told(news)
        self.stats.observe(outcomes, times)
        self._ahead = ahead if self.states else None
        return deltas

    def _may_begin_next(self, flight: InFlightStep) -> bool:
        """Not behind somebody's first words, which would wait for guesses."""
        return bool(self.states) and self.controller.allows_early_start and not flight.brings_first_words

    def _begin(self) -> InFlightStep | None:
        """Plan a step, guess, and give it to the device; None: there is nothing to do, or too little memory for it, and
        less is planned from now on."""
        began = perf_counter()
        plan = self.scheduler.schedule(self._budgets(self.scheduler.running))
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
            flight.odd = watch.is_outlier
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
        launched = drafted if output.argmax is None else perf_counter()
        return InFlightStep(plan, drafts, output, began, drafted, launched, proposing, self._clock.away, self._moment)

    def _prepare(self, flight: InFlightStep) -> None:
        """While a device reads new texts, let drafters read them, too."""
        first = [share.seq for share in flight.plan if share.reaches_end and not share.seq.num_output_tokens]
        new = [seq for seq in first if seq.request.drafters and seq.id in self.states]
        if new:
            began = perf_counter()
            self.safe_drafter.prepare(new)
            self._clock.away += perf_counter() - began  # the device may have long been done

    @property
    def _moment(self) -> tuple[int, int]:
        """What a step that was sent ahead does not outlive: what it is behind is lost, or lies on other pages."""
        return self.runner.num_steps if self.runner.supports_async else 0, self.scheduler.preemptions

    def _send_ahead(self, flight: InFlightStep) -> InFlightStep | None:
        """The step behind this one, begun before this one's tokens are known, where it will guess nothing; a text whose
        end they bring is in it for nothing."""
        running = self.scheduler.running
        stays = not flight.is_ahead or self._stays_plain(running)
        if not stays or not self.controller.expects_plain_step(running):
            return None
        rows = followers(flight, self.scheduler, self.lives, self._is_alone)
        shares = next_shares(flight, rows)
        if not shares or not all(self.runner.reserve(share.seq, share.length) for share in shares):
            return None
        wants = any(map(self.verifier.wants_top, flight.plan, flight.drafts)) if self.drafter.top_k else False
        began = perf_counter()
        with TimingGuard() as watch:
            sent = self.runner.forward_async(shares, rows, draws_of(flight), self.drafter.top_k if wants else 0)
        if watch.is_outlier:  # so is the step that it kept the host from
            mark_outlier()
        if sent is None:
            return None
        flight.landed = sent.wait_previous_tokens
        times = began, began, perf_counter()
        none = [NO_DRAFT] * len(shares)
        return InFlightStep(shares, none, sent.output, *times, moment=self._moment, is_ahead=True, odd=watch.is_outlier)

    def _stays_plain(self, running: list[Sequence]) -> bool:
        """A look at texts whose step runs already. What it finds cannot help that step, and costs no time either."""
        asked, nodes = self.controller.wants_free_drafts(running)
        return self.controller.keeps_plain(running, self.safe_drafter.free_drafts(asked, nodes))

    def _is_alone(self, share: ScheduledSequence) -> bool:
        return self.states[share.seq.id].stands_alone

    def lives(self, share: ScheduledSequence) -> bool:
        """Whether its text still stands where the step was planned for: one that was sent ahead may have ended since,
        or had to leave its pages."""
        return share.seq.id in self.states and share.seq.cached == share.start

    def _finish(self, outcomes: list[StepResult], times: StepTimes) -> None:
        """All that is written: let others learn from it, and give back what is not needed."""
        if not times.is_outlier:
            self.scheduler.observe([outcome.scheduled for outcome in outcomes], times.target_seconds)
        try:
            self._learn(outcomes, times)
        finally:  # only now: what drafters learn from may lie in these pages
            for outcome in outcomes:
                self.settle(outcome.scheduled.seq)

    def _shed(self, plan: list[ScheduledSequence], error: Exception) -> None:
        """Nothing was written: the same texts go on in smaller steps."""
        self.oom_backoff.shed(plan, error)
        for share in plan:
            self.scheduler.release_unused(share.seq)

    def _budgets(self, running: list[Sequence]) -> list[Budget]:
        """Let the controller decide, with the free guesses before it that it wants to see."""
        asked, nodes = self.controller.wants_free_drafts(running)
        return self.controller.choose_draft_lengths(running, self.safe_drafter.free_drafts(asked, nodes))

    def _propose(self, plan: list[ScheduledSequence]) -> list[Draft]:
        budgets = [self._asked(share) for share in plan]
        if self.runner.supports_async and may_stay_unseen(plan, budgets, self.drafter, str(self.runner.device)):
            free = [self.states[share.seq.id].matcher is None for share in plan]
            if all(free):  # a grammar looks at guesses
                budgets = [replace(budget, on_device=True) for budget in budgets]
        return self.safe_drafter.propose(plan, budgets)

    def _asked(self, share: ScheduledSequence) -> Budget:
        """What the drafter may guess. A budget that names nobody is room for what a grammar forces."""
        budget = share.budget
        nobody = budget.nodes and not budget.drafter and self.drafter.name
        return Budget() if nobody and self.states[share.seq.id].matcher is not None else budget

    def _learn(self, outcomes: list[StepResult], times: StepTimes) -> None:
        """The same outcomes for the controller, and for the drafter where it may learn from them."""
        self.safe_drafter.update_kv(outcomes)
        self.safe_drafter.observe(
            [outcome for outcome in outcomes if self.controller.learns_from(outcome.scheduled.seq)]
        )
        self.stats.drafter_failures = self.safe_drafter.failures
        self.controller.observe(outcomes, times)

    def _constrain(self, share: ScheduledSequence, draft: Draft) -> Draft:
        """What a grammar forces is guessed for free; what it forbids takes along only what hangs below it."""
        matcher = self.states[share.seq.id].matcher
        if matcher is None:
            return draft
        try:
            return constrain(draft, matcher, share.budget)
        except GrammarError:  # if it is more than this guess, the text itself will say so
            return Draft()

    def commit(self, outcome: StepResult, news: list[PendingDelta]) -> StepResult:
        """Let what was accepted enter the text, and note that it is to be told. The only place where a sequence
        grows."""
        share, verdict = outcome.scheduled, outcome.verify_result
        seq = share.seq
        if verdict is None:
            seq.cached += share.num_new_tokens
            return outcome
        self.runner.compact_kv(seq, share.length - 1, verdict.accepted_path)
        track, draft = self.states[seq.id], outcome.draft
        kept = track.take([*(draft.tokens[node] for node in verdict.accepted_path), verdict.next_token])
        seq.tokens += kept
        seq.cached = min(share.length + len(verdict.accepted_path), len(seq.tokens) - 1)
        outcome, track.untold = outcome.with_new_tokens(kept), True
        news.append(PendingDelta(track, outcome, "" if len(draft) else self.controller.skip_reason(seq)))
        return outcome

    def settle(self, seq: Sequence) -> None:
        """A step is over for a sequence: give back what it does not need, all of it where it has ended."""
        self.scheduler.release_unused(seq)
        if seq.finish_reason is not None:
            self._leave(self.states[seq.id])

    def _leave(self, track: SequenceState) -> None:
        del self.states[track.seq.id]
        self.scheduler.remove(track.seq)
        self.controller.forget(track.seq)
        self.safe_drafter.forget(track.seq)
        if not self.states:
            self._ahead = None
            self._clock.rest()
        self.stats.drafter_failures = self.safe_drafter.failures

    def _note_starts(self, plan: list[ScheduledSequence]) -> None:
        for share in plan:
            track = self.states[share.seq.id]
            if track.timings.started is None:
                track.timings.started = perf_counter()
                track.cached_prompt_tokens = share.start
                self.stats.cached_prompt_tokens += share.start
