"""Adaptive controller: chooses the drafter and the draft length of every sequence before each step.

`AdaptiveController.choose_draft_lengths` is where draft lengths are decided. It builds the options of each sequence
from two learned models, acceptance (`acceptance_model`) and latency (`latency_model`, `draft_latency`), lets the pure
function `choice.choose` maximise expected tokens per second, and turns the choices into budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter

from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes

from .acceptance_model import FIRST_TOKEN, AcceptanceModel, OpenDraft, request_class_of
from .choice import PLAIN, Choice, DrafterOption, StepCostView, best_choice, choose, min_probability
from .controller import Controller, FreeDrafts
from .decision_log import FIXED, LATE, NO_COSTS, NOT_POLLED, PAYS, PROBE, SLO, Decision, DecisionLog
from .draft_latency import DraftLatency, HostGap
from .latency_model import INITIAL_STEPS, StepCosts
from .options import OptionBuilder
from .sequence_history import HeldChoice, PollLimiter, Probes, SequenceHistory
from .settings import AlwaysAvailable, ControllerSettings, ControllerTuning, DrafterLoader

NO_BUDGET = Budget()
NO_DRAFTS: Mapping[str, Draft] = {}


class AdaptiveController(Controller):
    """Maximises expected tokens per second, from past steps and free drafts alone."""

    def __init__(
        self,
        traits: Mapping[str, DrafterTraits],
        settings: ControllerSettings = ControllerSettings(),
        costs: StepCosts | None = None,
        clock: Callable[[], float] = perf_counter,
        loader: DrafterLoader = AlwaysAvailable(),
        tuning: ControllerTuning = ControllerTuning(),
    ) -> None:
        self.traits, self.settings, self.loader, self.tuning = dict(traits), settings, loader, tuning
        self.clock = clock
        self.costs = costs or StepCosts(tuning=tuning)
        self.draft_latency = DraftLatency(self.traits, tuning)
        self.draft_costs = self.draft_latency.costs
        self.acceptance, self.host_gap = AcceptanceModel(self.traits, tuning), HostGap(tuning)
        self.poll_limiter, self.probes, self.decisions = PollLimiter(clock, tuning), Probes(tuning), DecisionLog()
        self.options = OptionBuilder(settings, self.costs, self.draft_latency, self.host_gap, tuning)
        self.states: dict[int, SequenceHistory] = {}  # by sequence
        self.step = 0
        self._free = self.draft_latency.free
        self._timed = sorted(name for name in traits if name not in self._free)
        self._considered: list[SequenceHistory] = []  # may draft in this step
        self._behind_slo: set[int] = set()  # of these, by id
        self._saved_seconds = 0.0  # time that the drafts of this step should save
        self._poll_length = float(tuning.new_drafter_tokens)  # tokens that free drafters are asked for
        self._held = HeldChoice()

    # What is asked before a step.

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self.step += 1
        step, plain_seconds = self.step, self.costs.single_row_seconds
        states = [self.states.get(seq.id) or self._add(seq) for seq in seqs if seq.request.drafters]
        decoding = [state for state in states if state.seq.is_decoding]
        polled = self.poll_limiter.select(decoding, step, plain_seconds)
        self._behind_slo = self._find_late(decoding, plain_seconds)
        for state in decoding if self._timed or self._behind_slo else ():
            if state.polled_at == step:
                continue
            if state.seq.id in self._behind_slo:
                state.polled_at = step
            elif state.wait_until > step or self._free.issuperset(state.seq.request.drafters):
                continue
            polled.append(state)  # the others are not polled, but their timed drafters are considered
        self._considered = considered = []
        for state in polled:
            state.limit = self.settings.max_length(state.seq)
            if state.limit:
                state.considered_at = step
                state.acceptance.resolve(state.seq.tokens)
                considered.append(state)
        if len(considered) < len(decoding):
            self._record_unpolled(seqs, decoding)
        if not considered:
            self.host_gap.observe_savings(0.0)
            return [], 0
        limit = self.settings.max_draft_tokens
        length = limit if self.settings.fixed_length is not None else min(limit, int(self._poll_length))
        return [state.seq for state in considered if self._is_polled(state)], length

    def _add(self, seq: Sequence) -> SequenceHistory:
        acceptance = self.acceptance.request(request_class_of(seq), seq.request.drafters)
        state = self.states[seq.id] = SequenceHistory(seq, acceptance)
        if state.has_slo:
            state.admitted = self.clock()
        return state

    def _is_polled(self, state: SequenceHistory) -> bool:
        return state.polled_at == self.step and not self._free.isdisjoint(state.seq.request.drafters)

    def _find_late(self, decoding: list[SequenceHistory], plain_seconds: float) -> set[int]:
        watched = [state for state in decoding if state.has_slo]
        now = self.clock() if watched else 0.0
        return {state.seq.id for state in watched if state.is_late(now, plain_seconds, self.tuning)}

    def _record_unpolled(self, seqs: list[Sequence], decoding: list[SequenceHistory]) -> None:
        unpolled = [state.seq.request.drafters for state in decoding if state.considered_at != self.step]
        self.decisions.record_unpolled(unpolled)
        if not self._considered and self.settings.fixed_length is None:
            self.decisions.record_step(False, lambda: self._explain(self.options.view(seqs), decoding))

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        """Return the drafter and the draft length of each sequence; sequences that are not considered get none."""
        considered = self._considered
        if not considered:
            return [NO_BUDGET] * len(seqs)
        if self.settings.fixed_length is not None:
            length = self.settings.fixed_length(sum(seq.pending == 1 for seq in seqs))
            budgets = {state.seq.id: self._fixed_budget(state, free_drafts, length) for state in considered}
        elif self.costs.steps < INITIAL_STEPS:  # the first steps are plain and measure the cost of one
            budgets = {}
            for state in considered:
                self._record_decision(state, NO_DRAFTS, "", NO_COSTS)
        else:
            held = self._reuse(seqs, free_drafts)
            budgets = self._adapt(seqs, free_drafts) if held is None else held
        for state in considered:
            if state.seq.id not in budgets and state.seq.request.params.structured_outputs is not None:
                budgets[state.seq.id] = Budget(state.limit)  # for tokens that a grammar forces
        self._finish_polls(free_drafts)
        return [budgets.get(seq.id, NO_BUDGET) for seq in seqs]

    def _reuse(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> dict[int, Budget] | None:
        """Return the budgets of the last choice if it still stands, or None."""
        if self._behind_slo or self.loader.unavailable or any(map(any, free_drafts.values())):
            return None
        budgets = self._held.reuse(seqs, self._considered, self.step)
        if budgets is None:
            return None
        for state in self._considered:
            if state.polled_at == self.step:
                self.poll_limiter.record_payoff(state, 0.0)
            self._record_decision(state, NO_DRAFTS, budgets.get(state.seq.id, NO_BUDGET).drafter, PAYS)
        self.decisions.record_step(bool(budgets), lambda: self._explain(self.options.view(seqs), self._considered))
        return budgets

    def _adapt(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> dict[int, Budget]:
        """Return the budgets that maximise expected tokens per second."""
        view = self.options.view(seqs)
        options, choices = self._choose(view, free_drafts)
        for state, mine, choice in zip(self._considered, options, choices, strict=True):
            if state.polled_at == self.step:
                self.poll_limiter.record_payoff(state, self._poll_savings(view, mine, choice))
        budgets = self._budgets(view, choices)
        held = dict(budgets)
        probed = self._add_probes(view, budgets)
        for state in self._considered:
            reason = PROBE if state.seq.id in probed else SLO if state.seq.id in self._behind_slo else PAYS
            drafter = budgets.get(state.seq.id, NO_BUDGET).drafter
            self._record_decision(state, free_drafts.get(state.seq.id, NO_DRAFTS), drafter, reason)
        self.decisions.record_step(bool(budgets), lambda: self._explain(view, self._considered))
        if probed or any(map(any, free_drafts.values())) or not self._is_familiar():
            self._held = HeldChoice()
        else:
            self._held = HeldChoice.of(self._considered, self.step, len(seqs), held, self.tuning.hold_steps)
        return budgets

    def _is_familiar(self) -> bool:
        """Return whether no timed drafter has so few trials that every draft tells much."""
        rates = [state.acceptance.rates for state in self._considered]
        return all(mine[name].group.is_familiar for mine in rates for name in self._timed if name in mine)

    def _choose(self, view: StepCostView, free_drafts: FreeDrafts) -> tuple[list[list[DrafterOption]], list[Choice]]:
        """Return the options of each considered sequence and the choice among them."""
        options = []
        for state in self._considered:
            drafts = free_drafts.get(state.seq.id, NO_DRAFTS) if self._is_polled(state) else None
            options.append(self.options.of(view, state, drafts))
        for state, mine in zip(self._considered, options, strict=True) if self._behind_slo else ():
            if state.seq.id in self._behind_slo and not self._can_catch_up(view, state, mine):
                self._behind_slo.discard(state.seq.id)
        urgent = [state.seq.id in self._behind_slo for state in self._considered] if self._behind_slo else []
        limits = self.settings.margin, self.settings.throughput, urgent, self.tuning
        choices, unavailable = choose(view, options, *limits), self.loader.unavailable
        if wanted := {choice.drafter for choice in choices} & unavailable:
            for drafter in sorted(wanted):
                self._request_load(drafter)
            available = [[each for each in mine if each.drafter not in unavailable] for mine in options]
            choices = choose(view, available, *limits)
        return options, choices

    def _can_catch_up(self, view: StepCostView, state: SequenceHistory, options: list[DrafterOption]) -> bool:
        """Return whether a sequence that is late on its SLO can still meet it if no other one drafted."""
        alone, now = replace(view, num_decoding=1), self.clock()
        speedup = best_choice(alone, options, self.settings.margin, self.tuning).speedup
        state.best_speed, state.best_until = speedup / alone.plain_seconds, now + self.tuning.slo_hold_seconds
        return state.is_late(now, self.costs.single_row_seconds, self.tuning)

    def _poll_savings(self, view: StepCostView, options: list[DrafterOption], choice: Choice) -> float:
        """Return what a poll should save beyond the best timed draft, in seconds."""
        if not choice.nodes or choice.drafter not in self._free:
            return 0.0
        timed = [each for each in options if each.prices is not None]
        other = best_choice(view, timed, self.settings.margin, self.tuning) if timed else PLAIN
        return (choice.speedup - other.speedup) * view.plain_share

    def _budgets(self, view: StepCostView, choices: list[Choice]) -> dict[int, Budget]:
        """Return the budgets of the sequences that draft."""
        budgets: dict[int, Budget] = {}
        saved, least = 0.0, max(1, self.settings.min_draft_tokens)
        for state, choice in zip(self._considered, choices, strict=True):
            if choice.nodes < least:
                if state.wait_until <= self.step:  # exponential backoff of timed drafters that do not pay
                    state.wait = min(max(8, 2 * state.wait), self.tuning.probe_interval)
                    state.wait_until = self.step + state.wait
                continue
            state.wait = state.wait_until = 0
            saved += (choice.speedup - 1) * view.plain_share
            threshold = 0.0
            if choice.prices is not None:
                seconds = view.sequence_seconds(choice.nodes, choice.prices, choice.depth)
                state.draft_steps = seconds / view.plain_share - 1
                is_single_graph = self.draft_latency.is_single_graph(choice.drafter, state.seq)
                threshold = min_probability(view, choice, is_single_graph, self.tuning)
            budgets[state.seq.id] = Budget(choice.nodes, choice.drafter, threshold, max_depth=choice.levels)
        lengths = (2 * budget.depth + 1 for budget in budgets.values())
        self._poll_length = max(0.95 * self._poll_length, self.tuning.new_drafter_tokens, *lengths)
        self.host_gap.observe_savings(saved)
        return budgets

    def _due_probes(self, view: StepCostView, used: set[str]) -> Iterator[tuple[str, SequenceHistory, Budget, float]]:
        """Yield the timed drafters that were not used for long, each with a sequence, a short draft and its seconds."""
        for drafter in self._timed:
            if not self.probes.is_idle(drafter, drafter in used, self.step):
                continue
            able = [state for state in self._considered if drafter in state.acceptance.rates]
            if able:
                state = min(able, key=lambda each: self.options.prefill_tokens(each, drafter))
                length = max(self.tuning.probe_tokens, self.settings.min_draft_tokens)
                nodes, prefill = (
                    min(length, state.limit),
                    self.options.prefill_tokens(state, drafter),
                )
                seconds = self.draft_costs[drafter].seconds(nodes, nodes, prefill, view.plain_seconds)
                yield drafter, state, Budget(nodes, drafter, is_exploration=True), seconds + view.extra_seconds(nodes)

    def _add_probes(self, view: StepCostView, budgets: dict[int, Budget]) -> set[int]:
        """Add the probes that are due and return their sequences."""
        probed: set[int] = set()
        for drafter, state, budget, seconds in self._due_probes(view, {each.drafter for each in budgets.values()}):
            if not self.probes.begin(drafter, self.step, seconds, view.plain_seconds):
                continue
            if drafter in self.loader.unavailable:
                self._request_load(drafter)
                continue
            budgets[state.seq.id] = budget
            probed.add(state.seq.id)
        return probed

    def _request_load(self, drafter: str) -> None:
        for state in self.states.values():
            state.prefilled.pop(drafter, None)  # it was unloaded with its KV cache
        self.loader.request_load(drafter)

    def _finish_polls(self, free_drafts: FreeDrafts) -> None:
        for state in self._considered:
            drafts = free_drafts.get(state.seq.id)
            if drafts:
                state.acceptance.add_free(state.seq, drafts)
        self.poll_limiter.finish_polls()

    def _fixed_budget(self, state: SequenceHistory, free_drafts: FreeDrafts, length: int) -> Budget:
        """Return a budget of a fixed length with the drafter that has the most expected accepted tokens."""
        for drafter in self.loader.unavailable.intersection(state.seq.request.drafters):
            self._request_load(drafter)
        drafts = free_drafts.get(state.seq.id, NO_DRAFTS)
        budget = self.options.fixed(state, drafts, length, self.loader.unavailable, len(self._considered))
        self._record_decision(state, drafts, budget.drafter, FIXED)
        return budget

    def _record_decision(self, state: SequenceHistory, drafts: Mapping[str, Draft], drafter: str, reason: str) -> None:
        drafters, free = state.seq.request.drafters, self._free
        with_draft = [name for name in drafters if name in drafts or name not in free]
        unpolled = () if state.polled_at == self.step else [name for name in drafters if name in free]
        state.skip_reason = self.decisions.record_sequence(drafters, with_draft, unpolled, drafter, reason)

    # Async scheduling.

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """Return whether an async step, which saves the host gap but has no drafts, is worth more than drafts."""
        if super().expects_plain_step(seqs):
            return True
        adapts = self.settings.fixed_length is None and self.costs.is_known and not self._behind_slo
        return adapts and self.host_gap.outweighs_drafts(len(seqs))

    def keeps_plain(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> bool:
        """A free draft of one token is for the in-flight step, so it is of no use for the next."""
        if not self._considered:
            return True
        if self.settings.fixed_length is not None or not self.costs.is_known:
            return False
        view, self._held = self.options.view(seqs), HeldChoice()
        _, choices = self._choose(view, free_drafts)
        budgets = self._budgets(view, choices)
        due = [state for _, state, _, _ in self._due_probes(view, {each.drafter for each in budgets.values()})]
        for state in due:
            state.wait = state.wait_until = 0  # the next step makes the probe
        for state in self._considered:
            found = state.seq.id in budgets
            if state.polled_at == self.step:
                self.poll_limiter.record_late(state, found)
            self._record_decision(state, free_drafts.get(state.seq.id, NO_DRAFTS), "", LATE if found else PAYS)
        self.decisions.record_step(bool(budgets), lambda: self._explain(view, self._considered))
        self._finish_polls(free_drafts)
        return not due and not any(each.nodes > 1 or each.drafter not in self._free for each in budgets.values())

    # What is learned after a step.

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Drop drafts that are too short, unless a token was sampled: dropping it for its value would be a bias."""
        least = self.settings.min_draft_tokens
        if not least:
            return drafts
        return [Draft() if len(draft) < least and not any(draft.sampled or ()) else draft for draft in drafts]

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        rows = budgeted = 0
        only_decoding, has_timed = True, False
        for result in results:
            scheduled = result.scheduled
            rows += scheduled.num_new_tokens + len(result.draft.parents)
            budgeted += scheduled.budget.nodes
            has_timed |= scheduled.budget.nodes > 0 and scheduled.budget.drafter not in self._free
            only_decoding &= scheduled.num_new_tokens == 1
        if times.host_gap is not None and not times.is_outlier:
            self.host_gap.observe(len(results), times.host_gap, has_timed)
        self.host_gap.observe_step(len(results), budgeted > 0, self.clock(), times if only_decoding else None)
        # A prefill step says little about the cost of one row, so the latency model does not start with one.
        if not times.is_outlier and (only_decoding or self.costs.is_known) and self.costs.should_observe(rows):
            context = sum([each.scheduled.start for each in results])
            pairs = [each.scheduled.start * (each.scheduled.num_new_tokens + len(each.draft) - 1) for each in results]
            self.costs.observe(rows, context, times.target_seconds, sum(pairs))
        if has_timed and self.costs.is_known:
            prefill = sum([self._prefilled(each) for each in results if len(each.draft)])
            seconds = times.draft_seconds if times.propose_seconds is None else times.propose_seconds
            if not times.is_outlier:
                self.draft_latency.observe(results, prefill, seconds, self.costs.single_row_seconds)
        for result in results if self._considered else ():
            state = self.states.get(result.scheduled.seq.id)
            if state is not None and result.verify_result is not None:
                if result.scheduled.budget.nodes:
                    self._observe_draft(state, result)
                state.acceptance.resolve(state.seq.tokens)

    def _prefilled(self, result: StepResult) -> int:
        """Return the tokens that a drafter prefilled for a draft, which is recorded."""
        state, traits = self.states.get(result.scheduled.seq.id), self.traits.get(result.scheduled.budget.drafter)
        return state.prefill(result.scheduled) if state and traits and traits.needs_prefill else 0

    def _observe_draft(self, state: SequenceHistory, result: StepResult) -> None:
        """Follow the draft of a timed drafter; free ones are followed already."""
        scheduled, draft, acceptance = result.scheduled, result.draft, state.acceptance
        drafter = scheduled.budget.drafter
        if drafter not in acceptance.rates or drafter in self._free or draft.source not in (drafter, ""):
            return
        rates = acceptance.rates[drafter]
        state.lost_steps += state.draft_steps - result.num_accepted
        if not len(draft):  # its time was spent and it drafted nothing: as bad as a rejected token
            rates.count(FIRST_TOKEN, False)
            return
        confidence = acceptance.free_confidence
        acceptance.open.append(OpenDraft(rates, draft, scheduled.length, scheduled.budget, confidence))
        if result.num_accepted:
            self.probes.reset_backoff(drafter)

    def learns_from(self, seq: Sequence) -> bool:
        state = self.states.get(seq.id)
        return state is not None and state.polled_at == self.step

    def forget(self, seq: Sequence) -> None:
        state = self.states.pop(seq.id, None)
        if state is not None:
            state.acceptance.resolve(seq.tokens)

    # What can be seen from outside.

    def _explain(self, view: StepCostView, states: list[SequenceHistory]) -> str:
        """Return why speculation is on or off, for the log."""
        rates = self.options.break_even(view, states)
        is_sampled = any(state.seq.request.params.temperature > 0 for state in states)
        return self.decisions.explain(rates, view.num_decoding, self.settings.min_draft_tokens, is_sampled)

    def skip_reason(self, seq: Sequence) -> str:
        state = self.states.get(seq.id)
        if state is None or not state.polled_at:
            return ""
        return state.skip_reason if state.considered_at == self.step else NOT_POLLED

    @property
    def decision_counts(self) -> dict[Decision, int]:
        return self.decisions.counts

    @property
    def speculation_state(self) -> tuple[bool, str]:
        return self.decisions.on, self.decisions.reason

    @property
    def num_switches(self) -> int:
        return self.decisions.num_switches

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.costs.seconds(batch, context) if self.costs.is_known else None
