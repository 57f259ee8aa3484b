"""Adaptive controller: chooses the drafter and the draft length of every sequence before each step.

`AdaptiveController.choose_draft_lengths` is where draft lengths are decided. It maximises expected tokens per second
with two learned models: acceptance (`acceptance_model`) and latency (`latency_model`, `draft_latency`). The search over
drafters, lengths and trees is in `length_optimizer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes

from .acceptance_model import AcceptanceModel, AcceptancePrior, request_class_of
from .acceptance_tracker import AcceptanceTracker
from .controller import Controller, FixedLengthPolicy, FreeDrafts
from .decision_log import (
    BASELINE,
    FIXED,
    LATE,
    NO_COSTS,
    NOT_POLLED,
    PAYS,
    PROBE,
    SKIPPED,
    SLO,
    Decision,
    DecisionLog,
    SwitchContext,
    explain_switch,
)
from .draft_latency import DraftLatency
from .exploration import BaselineSteps, DrafterExploration
from .latency_model import HostGap, StepCosts, StepCostView
from .length_optimizer import PLAIN, DraftPlan, LengthOptimizer, PlanCache, best_plan, planned_speedup
from .poll_limiter import PollLimiter
from .settings import MAX_TREE_ROWS, AlwaysAvailable, ControllerSettings, ControllerTuning, DrafterLoader
from .slo import SloTracker

NO_BUDGET = Budget()


class AdaptiveController(Controller):
    """Maximises expected tokens per second over the batch, from past steps and free drafts alone."""

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
        self.costs = costs or StepCosts(tuning=tuning.latency)
        self.draft_latency = DraftLatency(traits, tuning.latency)
        self.draft_costs = self.draft_latency.costs
        self.poll_limiter = PollLimiter(clock, tuning.poll)
        trusts = {True: tuning.acceptance.confidence_trust, False: tuning.acceptance.cross_trust}
        priors = {name: AcceptancePrior(each.prior_acceptance, trusts[each.is_free]) for name, each in traits.items()}
        self.acceptance = AcceptanceModel(priors, tuning.acceptance)
        self.decisions = DecisionLog(tuning.decisions)
        self.exploration = DrafterExploration(tuning.exploration)
        self.baseline = BaselineSteps(tuning.exploration)
        self.slo = SloTracker(clock, tuning.slo)
        self.host_gap = HostGap(tuning.host_gap)
        self.tracker = AcceptanceTracker(self.acceptance, self.draft_latency.is_timed, self.exploration.reset_backoff)
        self.optimizer = LengthOptimizer(self.traits, settings, self.tracker, self.draft_latency, tuning.length)
        self.plans = PlanCache(self.optimizer, tuning.acceptance.familiar)
        self.fixed_policy = FixedLengthPolicy(self.traits, settings, self.tracker, loader, self._request_load)
        self._free = self.draft_latency.free
        self._timed = sorted(name for name in traits if name not in self._free)
        self._all_free = self._free.issuperset(traits)
        self._makes_trees = any(each.makes_trees and not each.is_free for each in traits.values())
        self._num_drafts: Counter[str] = Counter()  # by timed drafter
        self._skip_reasons: dict[int, str] = {}  # by sequence, of this step
        self._polled: list[Sequence] = []  # in this step
        self._behind_slo: frozenset[int] = frozenset()  # polled sequences that are behind their SLO
        self._saved_seconds: dict[int, float] = {}  # by sequence: time that the drafts of this step should save
        self._poll_length = float(tuning.length.new_drafter_tokens)  # tokens that free drafters are asked for

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self.tracker.begin_step()
        self._skip_reasons.clear()
        plain_seconds = self.costs.single_row_seconds
        decoding = [seq for seq in seqs if seq.request.drafters and seq.is_decoding]
        behind_slo = self.slo.late(seqs, plain_seconds)
        self._polled = self.poll_limiter.select(decoding, plain_seconds) if decoding else []
        self._behind_slo = frozenset()
        if behind_slo:
            self._poll_behind_slo(behind_slo)
        if self._polled:
            self._polled = [seq for seq in self._polled if self.settings.max_length(seq)]
        if len(self._polled) < len(decoding):
            self._record_unpolled(seqs, decoding)
        if not self._polled:
            self.host_gap.observe_savings(0.0)
            return [], 0
        for seq in self._polled:
            self.tracker.catch_up(seq)
        with_free = [seq for seq in self._polled if not self._free.isdisjoint(seq.request.drafters)]
        limit = self.settings.max_draft_tokens
        length = self._poll_length if self.settings.fixed_length is None else limit
        return with_free, min(limit, int(length))

    def _poll_behind_slo(self, seqs: list[Sequence]) -> None:
        """Poll the sequences that are behind their SLO whatever their credit."""
        seqs = [seq for seq in seqs if seq.request.drafters and seq.is_decoding]
        self._behind_slo = frozenset(seq.id for seq in seqs)
        for seq in seqs:
            if self.poll_limiter.was_skipped(seq.id):
                self.poll_limiter.force(seq)
                self._polled.append(seq)

    def _record_unpolled(self, seqs: list[Sequence], decoding: list[Sequence]) -> None:
        skipped = [seq for seq in decoding if self.poll_limiter.was_skipped(seq.id)] if self._polled else decoding
        self.decisions.record_unpolled([seq.request.drafters for seq in skipped])
        if not self._polled and self.settings.fixed_length is None:
            self.decisions.record_step(False, lambda: self._explain(self._cost_view(seqs), decoding))

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        """Return the drafter and the draft length of each sequence; sequences that were not polled get none."""
        polled = self._polled
        if not polled:
            return [NO_BUDGET] * len(seqs)
        if self.settings.fixed_length is not None:
            num_decoding = sum(seq.pending == 1 for seq in seqs)
            budgets = self._fixed_budgets(polled, free_drafts, self.settings.fixed_length(num_decoding))
        elif self.costs.is_known:
            budgets = self._optimize(seqs, polled, free_drafts)
            for seq in polled:
                self.poll_limiter.record_payoff(seq.id, self._saved_seconds.get(seq.id, 0.0))
        else:  # the first step is plain and measures the cost of one
            budgets = {}
            for seq in polled:
                self._skip_reasons[seq.id] = NO_COSTS
                for drafter in seq.request.drafters:
                    self.decisions.record(drafter, SKIPPED, NO_COSTS)
        for seq in polled:
            if seq.id not in budgets and seq.request.params.structured_outputs is not None:
                budgets[seq.id] = Budget(self.settings.max_length(seq))  # for tokens that a grammar forces
        self._finish_polls(polled, free_drafts)
        return [budgets.get(seq.id, NO_BUDGET) for seq in seqs]

    def _optimize(
        self, seqs: list[Sequence], polled: list[Sequence], free_drafts: FreeDrafts, in_flight: bool = False
    ) -> dict[int, Budget]:
        """Return the budgets that maximise expected tokens per second. `in_flight`: the step is already in flight."""
        if self._all_free and not self._behind_slo and not any(free_drafts.values()):
            budgets = self._no_drafts(seqs, polled)
        else:
            budgets = self._adapt(self._cost_view(seqs), polled, free_drafts, in_flight)
        self.host_gap.observe_savings(sum(self._saved_seconds.values()))
        return budgets

    def _no_drafts(self, seqs: list[Sequence], polled: list[Sequence]) -> dict[int, Budget]:
        """Record a step in which no drafter has a draft: the common case where drafts are rare, so it is short."""
        tuning = self.tuning.length
        self._saved_seconds.clear()
        self._poll_length = max(tuning.poll_length_decay * self._poll_length, tuning.new_drafter_tokens)
        for seq in polled:
            self._skip_reasons[seq.id] = self.decisions.record_sequence(seq.request.drafters, (), "", PAYS)
        self.baseline.record_step(False)
        self.decisions.record_step(False, lambda: self._explain(self._cost_view(seqs), polled))
        return {}

    def _adapt(
        self, view: StepCostView, polled: list[Sequence], free_drafts: FreeDrafts, in_flight: bool
    ) -> dict[int, Budget]:
        """Plan each sequence, allocate lengths over the batch, then add a baseline step or probes."""
        with_priority = self._plan_behind_slo(view, polled, free_drafts) if self._behind_slo else {}
        plans = [with_priority.get(seq.id) or self._plan(view, seq, free_drafts.get(seq.id, {})) for seq in polled]
        lengths = self.optimizer.lengths(view, plans, [seq.id in with_priority for seq in polled])
        budgets = self._budgets(view, polled, plans, lengths, in_flight)
        tuning = self.tuning.length
        poll_lengths = (2 * budget.depth + 1 for budget in budgets.values())
        self._poll_length = max(tuning.poll_length_decay * self._poll_length, tuning.new_drafter_tokens, *poll_lengths)
        speedup = max(plan.speedup for plan in plans)
        compared: set[int] = set()
        if budgets and not self._behind_slo and not in_flight and self.baseline.is_due(self.costs.steps, speedup):
            compared = set(budgets)
            budgets.clear()
        probed = set() if compared else self._probe(view, polled, budgets, in_flight)
        for seq in polled:
            if seq.id in compared:
                reason = BASELINE
            elif in_flight and seq.id in budgets:
                reason = LATE
            elif seq.id in probed:
                reason = PROBE
            else:
                reason = SLO if seq.id in self._behind_slo else PAYS
            drafter = "" if in_flight else budgets.get(seq.id, NO_BUDGET).drafter
            self._record_decision(seq, free_drafts, drafter, reason)
        self.baseline.record_step(bool(budgets) and not in_flight)
        self.decisions.record_step(bool(budgets or compared), lambda: self._explain(view, polled))
        return budgets

    def _record_decision(self, seq: Sequence, free_drafts: FreeDrafts, drafter: str, reason: str) -> None:
        drafters, offered = seq.request.drafters, free_drafts.get(seq.id, {})
        with_draft = [name for name in drafters if name in offered or name not in self._free]
        self._skip_reasons[seq.id] = self.decisions.record_sequence(drafters, with_draft, drafter, reason)

    def _plan(self, view: StepCostView, seq: Sequence, free_drafts: Mapping[str, Draft]) -> DraftPlan:
        """Return the best plan of a sequence. If its drafter is unloaded, request it and take the next best."""
        optimizer, margin = self.optimizer, self.settings.margin
        options = optimizer.free_options(seq, free_drafts)
        free_plan = best_plan(view, options, margin, optimizer.tuning) if options else PLAIN
        if self._all_free:
            return free_plan
        timed_plan = self.plans.best_timed_plan(view, seq)
        if timed_plan.speedup > free_plan.speedup and timed_plan.drafter in (away := self.loader.unavailable):
            self._request_load(timed_plan.drafter)
            timed_plan = best_plan(view, optimizer.timed_options(view, seq, away), margin, optimizer.tuning)
        return timed_plan if timed_plan.speedup > free_plan.speedup else free_plan

    def _plan_behind_slo(
        self, view: StepCostView, polled: list[Sequence], free_drafts: FreeDrafts
    ) -> dict[int, DraftPlan]:
        """Plan sequences that are behind their SLO as if no other one drafted.

        Those that will miss it even so lose their priority.
        """
        alone = replace(view, num_decoding=1)
        plans = {
            seq.id: self._plan(alone, seq, free_drafts.get(seq.id, {})) for seq in polled if seq.id in self._behind_slo
        }
        for seq in polled:
            plan = plans.get(seq.id)
            if plan is not None:
                best = plan.speedup / alone.plain_seconds  # tokens per second
                if not self.slo.can_catch_up(seq, self.costs.single_row_seconds, best):
                    del plans[seq.id]
        self._behind_slo = frozenset(plans)
        return plans

    def _budgets(
        self, view: StepCostView, polled: list[Sequence], plans: list[DraftPlan], lengths: list[int], in_flight: bool
    ) -> dict[int, Budget]:
        """Return the budgets of the sequences that draft, and note what their drafts should save."""
        budgets: dict[int, Budget] = {}
        self._saved_seconds.clear()
        for seq, plan, nodes in zip(polled, plans, lengths, strict=True):
            if nodes and nodes >= self.settings.min_draft_tokens:
                gain = planned_speedup(view, plan, nodes) - 1
                self._saved_seconds[seq.id] = gain * view.plain_seconds / view.num_decoding
                longer = 0 if in_flight else self._extra_level(seq, plan, min(nodes, plan.depth))
                budgets[seq.id] = self.optimizer.budget(view, seq, plan, nodes, longer)
                self.tracker.expect(seq, plan.accept_probs)
        return budgets

    def _extra_level(self, seq: Sequence, plan: DraftPlan, depth: int) -> int:
        """Return 1 for one draft in 24 of a timed drafter, so that greater depths are measured, too, else 0."""
        if plan.drafter in self._free:
            return 0  # all tokens of free drafts are counted anyway
        self._num_drafts[plan.drafter] += 1
        is_due = self._num_drafts[plan.drafter] % self.tuning.length.longer_every == 0
        return min(1 if is_due else 0, self.settings.max_length(seq) - depth)

    def _probe(
        self, view: StepCostView, polled: list[Sequence], budgets: dict[int, Budget], in_flight: bool
    ) -> set[int]:
        """Add short drafts by timed drafters that were not used for long, each for one sequence."""
        probed: set[int] = set()
        used, step = {budget.drafter for budget in budgets.values()}, self.poll_limiter.step
        for drafter in self._timed:
            able = [seq for seq in polled if drafter in seq.request.drafters]
            if not able or not self.exploration.is_idle(drafter, drafter in used, step):
                continue
            seq = min(able, key=lambda each: self.draft_latency.prefill_tokens(each, drafter))
            length = max(self.tuning.exploration.probe_tokens, self.settings.min_draft_tokens)
            nodes = min(length, self.settings.max_length(seq))
            seconds = self.draft_latency.probe_seconds(view, seq, drafter, nodes) + view.extra_seconds(nodes)
            if not self.exploration.is_due(drafter, step, seconds, view.plain_seconds):
                continue
            unloaded = drafter in self.loader.unavailable
            if unloaded or not in_flight:
                self.exploration.begin(drafter, step, seconds, view.plain_seconds)
            if unloaded:
                self._request_load(drafter)
                continue
            budgets[seq.id] = Budget(nodes, drafter, is_exploration=True)
            self.tracker.expect(seq, ())
            probed.add(seq.id)
        return probed

    def _request_load(self, drafter: str) -> None:
        self.draft_latency.forget_drafter(drafter)
        self.loader.request_load(drafter)

    def _finish_polls(self, polled: list[Sequence], free_drafts: FreeDrafts) -> None:
        for seq in polled:
            self.tracker.add_free_drafts(seq, free_drafts.get(seq.id, {}))
        self.poll_limiter.finish_polls()

    def _fixed_budgets(self, polled: list[Sequence], free_drafts: FreeDrafts, length: int) -> dict[int, Budget]:
        budgets = {}
        for seq in polled:
            budget = self.fixed_policy.budget(seq, free_drafts.get(seq.id, {}), length, len(polled))
            if budget.drafter:
                budgets[seq.id] = budget
            self._record_decision(seq, free_drafts, budget.drafter, FIXED)
        return budgets

    def _cost_view(self, seqs: list[Sequence]) -> StepCostView:
        """Return the costs of the next step with these sequences."""
        num_decoding = rows = cached = 0
        max_prompt_rows = self.tuning.length.max_prompt_rows
        for seq in seqs:
            pending = len(seq.tokens) - seq.num_computed_tokens
            num_decoding += pending == 1
            rows += min(pending, max_prompt_rows)
            cached += seq.num_computed_tokens
        most = self.settings.max_draft_tokens
        if self._makes_trees:
            most = max(most, min(self.settings.max_tree_nodes, MAX_TREE_ROWS // max(1, num_decoding)))
        return StepCostView(
            num_decoding=num_decoding,
            rows=rows,
            curve=self.costs.seconds_by_rows(rows + num_decoding * most),
            context_seconds=self.costs.context_seconds(cached),
            row_context_seconds=self.costs.pair_seconds * cached / len(seqs),  # each row attends to its own sequence
            host_gap=self.host_gap.seconds(num_decoding),
            hidden_gap=self.host_gap.hidden_seconds(num_decoding),
            padded_sizes=self.costs.sizes if rows == 1 else (),
        )

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """Return whether an async step, which saves the host gap but has no drafts, is worth more than drafts."""
        if super().expects_plain_step(seqs):
            return True
        adapts = self.settings.fixed_length is None and self.costs.is_known and not self._behind_slo
        return adapts and self.host_gap.outweighs_drafts(len(seqs))

    def keeps_plain(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> bool:
        """A free draft of one token is for the in-flight step, so it is of no use for the next."""
        polled = self._polled
        if not polled:
            return True
        if self.settings.fixed_length is not None or not self.costs.is_known:
            return False
        budgets = self._optimize(seqs, polled, free_drafts, in_flight=True)
        for seq in polled:
            self.poll_limiter.record_payoff(seq.id, 0.0, late=True)
        for seq_id in budgets:
            self.poll_limiter.poll_next_step(seq_id)
        self._finish_polls(polled, free_drafts)
        return not any(each.nodes > 1 or each.drafter not in self._free for each in budgets.values())

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Drop drafts that are too short, unless a token was sampled: dropping it for its value would be a bias."""
        least = self.settings.min_draft_tokens
        if not least:
            return drafts
        return [Draft() if len(draft) < least and not any(draft.sampled or ()) else draft for draft in drafts]

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        if times.host_gap is not None and not times.is_outlier:
            budgets = [each.scheduled.budget for each in results]
            device_drafts = any(budget.nodes and budget.drafter in self._timed for budget in budgets)
            self.host_gap.observe(len(results), times.host_gap, device_drafts)
        rows = budgeted = 0
        for result in results:
            rows += result.scheduled.num_new_tokens + len(result.draft.tokens)
            budgeted += result.scheduled.budget.nodes
        # A prefill step says little about the cost of one row, so the latency model does not start with one.
        is_usable = self.costs.is_known or all(result.scheduled.num_new_tokens == 1 for result in results)
        if not times.is_outlier and self.costs.should_observe(rows, budgeted > 0) and is_usable:
            context = sum(result.scheduled.start for result in results)
            pairs = sum(
                each.scheduled.start * (each.scheduled.num_new_tokens + len(each.draft) - 1) for each in results
            )
            self.costs.observe(rows, context, times.target_seconds, pairs)
        if budgeted and self.costs.is_known:
            seconds = times.draft_seconds if times.propose_seconds is None else times.propose_seconds
            measured = None if times.is_outlier else seconds
            self.draft_latency.observe(results, measured, self.costs.single_row_seconds)
        if self._polled:
            polled = {seq.id for seq in self._polled}
            for result in results:
                if result.verify_result is not None and result.scheduled.seq.id in polled:
                    self.tracker.observe(result)

    def _explain(self, view: StepCostView, seqs: list[Sequence]) -> str:
        """Return why speculation is on or off, for the log."""
        drafters = sorted({drafter for seq in seqs for drafter in seq.request.drafters})
        ((request_class, _),) = Counter(map(request_class_of, seqs)).most_common(1)
        rates = {
            drafter: (
                self.acceptance.first_rate(drafter, request_class),
                view.break_even(self.draft_latency.token_seconds(view, drafter)),
            )
            for drafter in drafters
        }
        context = SwitchContext(
            batch=view.num_decoding,
            is_sampled=any(seq.request.params.temperature > 0 for seq in seqs),
            on=self.decisions.on,
            rarely_drafts=self.decisions.rarely_drafts(drafters),
            min_draft_tokens=self.settings.min_draft_tokens,
        )
        return explain_switch(rates, context)

    def learns_from(self, seq: Sequence) -> bool:
        return bool(seq.request.drafters) and not self.poll_limiter.was_skipped(seq.id)

    def skip_reason(self, seq: Sequence) -> str:
        return self._skip_reasons.get(seq.id, NOT_POLLED if self.poll_limiter.was_skipped(seq.id) else "")

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

    def forget(self, seq: Sequence) -> None:
        self.tracker.forget(seq)
        self.poll_limiter.forget(seq.id)
        self.plans.forget(seq.id)
        self.draft_latency.forget(seq.id)
        self.slo.forget(seq.id)
        self._skip_reasons.pop(seq.id, None)
