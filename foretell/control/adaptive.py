"""Adaptive controller: chooses the drafter and the draft length of every sequence before each step.

`AdaptiveController.choose_draft_lengths` is where draft lengths are decided. It builds the options of each sequence
from two learned models, acceptance (`acceptance_model`) and latency (`latency_model`), lets the pure
function `choice.choose` maximise expected tokens per second, and turns the choices into budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes

from .acceptance_model import FIRST_TOKEN, AcceptanceModel, OpenDraft
from .choice import Choice, DrafterOption, StepCostView, best_choice, choose, min_probability
from .controller import Controller, FreeDrafts
from .decision_log import FIXED, LATE, NO_COSTS, PAYS, PROBE, SLO, DecisionLog
from .host_gap import HostGap
from .latency_model import INITIAL_STEPS, DraftLatency, StepCosts
from .options import OptionBuilder
from .sequence_history import PollLimiter, Probes, SequenceHistory
from .settings import ControllerSettings, ControllerTuning, DrafterLoader

NO_BUDGET = Budget()
NO_DRAFTS: Mapping[str, Draft] = {}
NO_REASONS: Mapping[int, str] = {}


class AdaptiveController(Controller):
    """Maximises expected tokens per second, from past steps and free drafts alone."""

    def __init__(
        self,
        traits: Mapping[str, DrafterTraits],
        settings: ControllerSettings = ControllerSettings(),
        costs: StepCosts | None = None,
        clock: Callable[[], float] = perf_counter,
        loader: DrafterLoader | None = None,
        tuning: ControllerTuning = ControllerTuning(),
    ) -> None:
        self.traits, self.settings, self.loader, self.tuning = dict(traits), settings, loader, tuning
        self.clock, self.costs = clock, costs or StepCosts(tuning=tuning)
        self.draft_latency, self.host_gap = DraftLatency(self.traits, tuning), HostGap(tuning)
        self.draft_costs = self.draft_latency.costs
        self.acceptance, self.probes = AcceptanceModel(self.traits, tuning), Probes(tuning)
        self.poll_limiter = PollLimiter(clock, tuning)
        self.options = OptionBuilder(settings, self.costs, self.draft_latency, self.host_gap, tuning)
        self.states: dict[int, SequenceHistory] = {}  # by sequence
        self.step = 0
        self._free = self.draft_latency.free
        self.decisions = DecisionLog(self._free)
        self._decoding: list[SequenceHistory] = []  # in this step
        self._late: set[int] = set()  # sequences that are late on their SLO
        self._poll_length = float(tuning.new_drafter_tokens)  # tokens that free drafters are asked for
        # The last choice stands for some steps: rates and costs change slowly, and choosing takes host time.
        self._held: tuple[list[int], dict[int, Budget]] = ([], {})  # sequences that ran, and budgets
        self._held_until = 0  # step
        self._saved_seconds = 0.0  # that the drafts of the last choice should save per step

    # What is asked before a step.

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self.step += 1
        for seq in seqs:
            if seq.id not in self.states and seq.request.drafters and self.settings.max_length(seq):
                self._add(seq)
        states = [self.states[seq.id] for seq in seqs if seq.id in self.states]
        self._decoding = decoding = [state for state in states if state.seq.is_decoding]
        self._late, plain_seconds = self._find_late(decoding), self.costs.single_row_seconds
        free, is_fixed = [state for state in decoding if state.has_free], self.settings.fixed_length is not None
        always = {state.seq.id for state in free} if is_fixed else self._late
        polled = self.poll_limiter.select(free, self.step, plain_seconds, always)
        for state in polled:
            state.resolve()
        most = self.settings.max_draft_tokens
        return [state.seq for state in polled], most if is_fixed else min(most, int(self._poll_length))

    def _find_late(self, decoding: list[SequenceHistory]) -> set[int]:
        """Return the sequences that are late on their SLO."""
        watched = [state for state in decoding if state.has_slo]
        now, plain_seconds = self.clock() if watched else 0.0, self.costs.single_row_seconds
        return {state.seq.id for state in watched if state.is_late(now, plain_seconds, self.tuning)}

    def _add(self, seq: Sequence) -> None:
        temperature = seq.request.params.temperature
        rates = {name: self.acceptance.rates(name, temperature) for name in seq.request.drafters}
        state = self.states[seq.id] = SequenceHistory(seq, rates)
        if state.has_slo:
            state.admitted = self.clock()

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        """Return the drafter and the draft length of each sequence. A choice stands for some steps without drafts."""
        if not self._decoding:
            return [NO_BUDGET] * len(seqs)
        has_drafts, budgets = any(free_drafts.values()), dict[int, Budget]()
        if self.settings.fixed_length is not None:
            budgets = self._fixed(seqs, free_drafts, self.settings.fixed_length(sum(seq.pending == 1 for seq in seqs)))
        elif self.costs.steps < INITIAL_STEPS:  # the first steps are plain and measure the cost of one
            self._record({}, free_drafts, NO_COSTS)
        elif not has_drafts and self._choice_stands(seqs):
            budgets = self._reuse(seqs)
        else:
            budgets = self._adapt(seqs, free_drafts, has_drafts)
        self._finish_polls(free_drafts)
        forced = [state.seq for state in self._decoding if state.seq.request.params.structured_outputs is not None]
        if forced:  # a grammar may force tokens, which need no drafter
            budgets = {**{seq.id: Budget(self.settings.max_length(seq)) for seq in forced}, **budgets}
        return [budgets.get(seq.id, NO_BUDGET) for seq in seqs] if budgets else [NO_BUDGET] * len(seqs)

    def _choice_stands(self, seqs: list[Sequence]) -> bool:
        """Return whether the last choice still stands: no sequence came, went, is late or too near its end."""
        held, budgets = self._held
        if self.step > self._held_until or self._late or held != [seq.id for seq in seqs]:
            return False
        if budgets and not self._unavailable.isdisjoint(budget.drafter for budget in budgets.values()):
            return False
        return not any(budgets[seq.id].depth >= seq.remaining_tokens for seq in seqs if seq.id in budgets)

    def _reuse(self, seqs: list[Sequence]) -> dict[int, Budget]:
        """Return the budgets of the last choice. Polls found nothing in this step."""
        for state in self._decoding:
            if state.polled_at == self.step:
                self.poll_limiter.record(state, 0.0)
        self.host_gap.observe_savings(self._saved_seconds)
        self._record(self._held[1], {})
        self._record_step(seqs, self._held[1])
        return self._held[1]

    def _hold(self, seqs: list[Sequence], budgets: dict[int, Budget], is_settled: bool) -> None:
        """Let a choice stand for some steps; not in a prefill, nor if each draft of a drafter still tells much."""
        is_known = all(self.states[i].rates[budget.drafter].is_known for i, budget in budgets.items())
        self._held, self._held_until = ([seq.id for seq in seqs], budgets), self.step
        if is_settled and is_known and all(seq.is_decoding for seq in seqs):
            self._held_until += self.tuning.hold_steps if budgets else self.tuning.plain_hold_steps

    def _adapt(self, seqs: list[Sequence], free_drafts: FreeDrafts, has_drafts: bool) -> dict[int, Budget]:
        """Return the budgets that maximise expected tokens per second."""
        view = self.options.view(seqs)
        considered, choices = self._choose(view, free_drafts)
        for state, choice in zip(considered, choices, strict=True):
            if state.polled_at == self.step:
                gained = choice.speedup - state.timed_speedup if choice.drafter in self._free else 0.0
                self.poll_limiter.record(state, gained * view.plain_share)
        budgets = self._budgets(view, considered, choices)
        probed = self._begin_probes(self._due_probes(view, considered, budgets))
        self._record({**budgets, **probed}, free_drafts, PAYS, dict.fromkeys(probed, PROBE))
        self._record_step(seqs, budgets)
        self._hold(seqs, budgets, not (has_drafts or probed))
        return {**budgets, **probed}

    def _choose(self, view: StepCostView, free_drafts: FreeDrafts) -> tuple[list[SequenceHistory], list[Choice]]:
        """Return the sequences that may draft and the choice of each."""
        considered, options = list[SequenceHistory](), list[list[DrafterOption]]()
        for state in self._decoding:
            state.limit = self.settings.max_length(state.seq)
            if state.limit and (state.has_timed or state.polled_at == self.step):
                considered.append(state)
                options.append(self.options.of(view, state, free_drafts.get(state.seq.id, NO_DRAFTS)))
        for state, mine in zip(considered, options, strict=True) if self._late else ():
            if state.seq.id in self._late and not self._can_catch_up(view, state, mine):
                self._late.discard(state.seq.id)
        late = [state.seq.id in self._late for state in considered] if self._late else []
        limits = self.settings.margin, self.settings.throughput, late, self.tuning
        choices, unavailable = choose(view, options, *limits), self._unavailable
        if wanted := {choice.drafter for choice in choices} & unavailable:
            for drafter in sorted(wanted):
                self._request_load(drafter)
            available = [[each for each in mine if each.drafter not in unavailable] for mine in options]
            choices = choose(view, available, *limits)
        return considered, choices

    def _can_catch_up(self, view: StepCostView, state: SequenceHistory, options: list[DrafterOption]) -> bool:
        """Return whether a sequence that is late on its SLO can still meet it if no other one drafted."""
        alone, now = replace(view, num_decoding=1), self.clock()
        speedup = best_choice(alone, options, self.settings.margin, self.tuning).speedup
        state.best_speed, state.best_until = speedup / alone.plain_seconds, now + self.tuning.slo_hold_seconds
        return state.is_late(now, self.costs.single_row_seconds, self.tuning)

    def _budgets(
        self, view: StepCostView, considered: list[SequenceHistory], choices: list[Choice]
    ) -> dict[int, Budget]:
        """Return the budgets of the sequences that draft."""
        budgets: dict[int, Budget] = {}
        self._saved_seconds, least = 0.0, max(1, self.settings.min_draft_tokens)
        for state, choice in zip(considered, choices, strict=True):
            if choice.drafter not in self._free:
                state.timed_speedup = choice.speedup
            if choice.nodes < least:
                continue
            self._saved_seconds += (choice.speedup - 1) * view.plain_share
            threshold = 0.0
            if choice.prices is not None:
                is_single_graph = self.draft_latency.is_single_graph(choice.drafter, state.seq)
                threshold = min_probability(view, choice, is_single_graph, self.tuning)
            budgets[state.seq.id] = Budget(choice.nodes, choice.drafter, threshold, max_depth=choice.levels)
        lengths = (2 * budget.depth + 1 for budget in budgets.values())
        self._poll_length = max(0.95 * self._poll_length, self.tuning.new_drafter_tokens, *lengths)
        self.host_gap.observe_savings(self._saved_seconds)
        return budgets

    def _due_probes(
        self, view: StepCostView, considered: list[SequenceHistory], budgets: dict[int, Budget]
    ) -> dict[int, Budget]:
        """Return a short draft for each timed drafter that was not used for long, one per sequence."""
        probes: dict[int, Budget] = {}
        used = {each.drafter for each in budgets.values()}
        for drafter in self.traits:
            able = [state for state in considered if drafter in state.rates and state.seq.id not in probes]
            if drafter in self._free or not able:
                continue
            state = min(able, key=lambda each: self.options.prefill_tokens(each, drafter))
            nodes = min(state.limit, max(self.tuning.probe_tokens, self.settings.min_draft_tokens))
            prices = self.draft_costs[drafter].prices(view.plain_seconds)
            seconds = prices.seconds(nodes, nodes, self.options.prefill_tokens(state, drafter))
            seconds += view.extra_seconds(nodes)
            if self.probes.is_due(drafter, drafter in used, self.step, seconds / view.plain_seconds):
                probes[state.seq.id] = Budget(nodes, drafter, is_exploration=True)
        return probes

    def _begin_probes(self, probes: dict[int, Budget]) -> dict[int, Budget]:
        """Record the probes of this step and return those whose drafters are loaded; the others are loaded."""
        unavailable = self._unavailable
        for budget in probes.values():
            self.probes.begin(budget.drafter, self.step)
            if budget.drafter in unavailable:
                self._request_load(budget.drafter)
        return {seq: budget for seq, budget in probes.items() if budget.drafter not in unavailable}

    def _fixed(self, seqs: list[Sequence], free_drafts: FreeDrafts, length: int) -> dict[int, Budget]:
        """Return budgets of a fixed length with the drafter that has the most expected accepted tokens."""
        budgets, view, unavailable = dict[int, Budget](), self.options.view(seqs), self._unavailable
        for drafter in unavailable.intersection(name for state in self._decoding for name in state.rates):
            self._request_load(drafter)
        for state in self._decoding:
            state.limit = limit = min(length, self.settings.max_length(state.seq))
            options = self.options.of(view, state, free_drafts.get(state.seq.id, NO_DRAFTS)) if limit else ()
            expected = {each.drafter: sum(each.accept_probs) for each in options if each.drafter not in unavailable}
            if expected:
                drafter = max(expected, key=expected.__getitem__)
                makes_trees, most = self.traits[drafter].makes_trees, self.settings.max_nodes(state.seq, len(seqs))
                is_tree = makes_trees and most > limit
                budgets[state.seq.id] = Budget(most if is_tree else limit, drafter, max_depth=limit if is_tree else 0)
        self._record(budgets, free_drafts, FIXED)
        return budgets

    def _finish_polls(self, free_drafts: FreeDrafts) -> None:
        """Follow free drafts, whether the step uses them or not: the output tokens decide about both."""
        for state in self._decoding if free_drafts else ():
            if drafts := free_drafts.get(state.seq.id):
                known, at = [name for name in drafts if name in state.rates], len(state.seq.tokens)
                state.open_drafts += [OpenDraft(state.rates[name], drafts[name], at) for name in known]
        self.poll_limiter.finish_polls()

    @property
    def _unavailable(self) -> frozenset[str]:
        return self.loader.unavailable if self.loader is not None else frozenset()

    def _request_load(self, drafter: str) -> None:
        for state in self.states.values():
            state.prefilled.pop(drafter, None)  # it was unloaded with its KV cache
        if self.loader is not None:
            self.loader.request_load(drafter)

    def _record(
        self,
        budgets: Mapping[int, Budget],
        free_drafts: FreeDrafts,
        reason: str = PAYS,
        reasons: Mapping[int, str] = NO_REASONS,
    ) -> None:
        """Record the decision on each sequence; `reasons` are those of single sequences."""
        for state in self._decoding:
            seq, drafter = state.seq, budgets.get(state.seq.id, NO_BUDGET).drafter
            why = reasons.get(seq.id, SLO if reason == PAYS and seq.id in self._late else reason)
            drafts = free_drafts.get(seq.id, NO_DRAFTS)
            polled = state.polled_at == self.step
            state.skip_reason = self.decisions.record(seq.request.drafters, drafts, polled, drafter, why)

    def _record_step(self, seqs: list[Sequence], budgets: Mapping[int, Budget]) -> None:
        self.decisions.record_step(bool(budgets), lambda: self._explain(seqs))

    # Async scheduling.

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """Return whether an async step, which saves the host gap but has no drafts, is worth more than drafts."""
        if super().expects_plain_step(seqs):
            return True
        adapts = self.settings.fixed_length is None and self.costs.is_known and not self._late
        return adapts and self.host_gap.outweighs_drafts(len(seqs))

    def keeps_plain(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> bool:
        """A free draft of one token is for the in-flight step, so it is of no use for the next."""
        if not self._decoding:
            return True
        if self.settings.fixed_length is not None or not self.costs.is_known:
            return False
        has_drafts = any(free_drafts.values())
        if not has_drafts and not self._held[1] and self._choice_stands(seqs):
            self._reuse(seqs)
            self._finish_polls(free_drafts)
            return True
        view = self.options.view(seqs)
        considered, choices = self._choose(view, free_drafts)
        budgets = self._budgets(view, considered, choices)
        probes = self._due_probes(view, considered, budgets)  # the next step makes them
        for state in considered:
            if state.polled_at == self.step:  # its step was in flight already, so that it could not save anything
                self.poll_limiter.record(state, 0.0)
                if state.seq.id in budgets:
                    state.poll_credit = max(state.poll_credit or 0.0, self.poll_limiter.poll_seconds)
        self._hold(seqs, budgets, not (has_drafts or probes or budgets))
        self._record({}, free_drafts, PAYS, dict.fromkeys(budgets, LATE))
        self._record_step(seqs, budgets)
        self._finish_polls(free_drafts)
        return not probes and not any(each.nodes > 1 or each.drafter not in self._free for each in budgets.values())

    # What is learned after a step.

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Drop drafts that are too short, unless a token was sampled: dropping it for its value would be a bias."""
        least = self.settings.min_draft_tokens
        if not least:
            return drafts
        return [Draft() if len(draft) < least and not any(draft.sampled or ()) else draft for draft in drafts]

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        rows = context = pairs = 0
        only_decoding, has_drafts, has_timed = True, False, False
        for result in results:
            scheduled = result.scheduled
            new = scheduled.num_new_tokens + len(result.draft.parents)
            rows, context, pairs = rows + new, context + scheduled.start, pairs + scheduled.start * (new - 1)
            drafter = scheduled.budget.drafter if scheduled.budget.nodes else ""
            has_drafts |= drafter in self.traits
            has_timed |= drafter in self.traits and drafter not in self._free
            only_decoding &= scheduled.num_new_tokens == 1
        if times.host_gap is not None and not times.is_outlier:
            self.host_gap.observe(len(results), times.host_gap, has_timed)
        self.host_gap.observe_step(len(results), has_drafts, self.clock(), times if only_decoding else None)
        # A prefill step says little about the cost of one row, so the latency model does not start with one.
        if not times.is_outlier and (only_decoding or self.costs.is_known) and self.costs.should_observe(rows):
            self.costs.observe(rows, context, times.target_seconds, pairs)
        if has_timed and self.costs.is_known:
            prefill = sum([self._prefilled(each) for each in results if len(each.draft)])
            seconds = times.draft_seconds if times.propose_seconds is None else times.propose_seconds
            if not times.is_outlier:
                self.draft_latency.observe(results, prefill, seconds, self.costs.single_row_seconds)
        for result in results if self._decoding else ():
            state = self.states.get(result.scheduled.seq.id)
            if state is not None and result.verify_result is not None:
                if result.scheduled.budget.nodes:
                    self._observe_draft(state, result)
                state.resolve()

    def _prefilled(self, result: StepResult) -> int:
        """Return the tokens that a drafter prefilled for a draft, which is recorded."""
        state, traits = self.states.get(result.scheduled.seq.id), self.traits.get(result.scheduled.budget.drafter)
        return state.prefill(result.scheduled) if state and traits and traits.needs_prefill else 0

    def _observe_draft(self, state: SequenceHistory, result: StepResult) -> None:
        """Follow the draft of a timed drafter; free ones are followed already."""
        scheduled, draft = result.scheduled, result.draft
        drafter = scheduled.budget.drafter
        if drafter not in state.rates or drafter in self._free or draft.source not in (drafter, ""):
            return
        if not len(draft):  # its time was spent and it drafted nothing: as bad as a rejected token
            state.rates[drafter].count(FIRST_TOKEN, False)
            return
        state.open_drafts.append(OpenDraft(state.rates[drafter], draft, scheduled.length, scheduled.budget))
        if result.num_accepted:
            self.probes.reset_backoff(drafter)

    def learns_from(self, seq: Sequence) -> bool:
        state = self.states.get(seq.id)
        return state is not None and (state.polled_at == self.step or not state.has_free)

    def forget(self, seq: Sequence) -> None:
        state = self.states.pop(seq.id, None)
        if state is not None:
            state.resolve()

    # What can be seen from outside.

    def _explain(self, seqs: list[Sequence]) -> str:
        """Return why speculation is on or off, for the log."""
        view = self.options.view(seqs)
        rates = self.options.break_even(view, self._decoding)
        is_sampled = any(state.seq.request.params.temperature > 0 for state in self._decoding)
        return self.decisions.explain(rates, view.num_decoding, self.settings.min_draft_tokens, is_sampled)

    def skip_reason(self, seq: Sequence) -> str:
        state = self.states.get(seq.id)
        return "" if state is None else state.skip_reason

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.costs.seconds(batch, context) if self.costs.is_known else None
