"""Adaptive controller: chooses the drafter and the draft length of every sequence before each step.

`AdaptiveController.choose_draft_lengths` is where draft lengths are decided. It builds the options of each sequence
from two learned models, acceptance (`acceptance_model`) and latency (`latency_model`, `draft_latency`), lets the pure
function `choice.choose` maximise expected tokens per second, and turns the choices into budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes

from .acceptance_model import FIRST_TOKEN, AcceptanceModel, OpenDraft, RequestAcceptance, request_class_of
from .choice import PLAIN, Choice, DrafterOption, StepCostView, best_choice, choose, min_probability
from .controller import Controller, FreeDrafts
from .decision_log import (
    BASELINE,
    FIXED,
    LATE,
    NO_COSTS,
    NOT_POLLED,
    PAYS,
    PROBE,
    SLO,
    Decision,
    DecisionLog,
)  # fmt: skip
from .draft_latency import DraftLatency, HostGap
from .latency_model import StepCosts
from .options import OptionBuilder
from .overhead import Exploration, HeldChoice, PollLimiter
from .settings import AlwaysAvailable, ControllerSettings, ControllerTuning, DrafterLoader
from .slo import SloTracker

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
        self.acceptance = AcceptanceModel(self.traits, tuning)
        self.poll_limiter, self.exploration = PollLimiter(clock, tuning), Exploration(tuning)
        self.slo, self.host_gap, self.decisions = SloTracker(clock, tuning), HostGap(tuning), DecisionLog()
        self._free = self.draft_latency.free
        self._timed = sorted(name for name in traits if name not in self._free)
        self.options = OptionBuilder(settings, self.costs, self.draft_latency, self.host_gap, tuning)
        self._requests: dict[int, RequestAcceptance] = {}  # by sequence
        self._skip_reasons: dict[int, str] = {}  # by sequence, of this step
        self._considered: list[Sequence] = []  # sequences that may draft in this step
        self._behind_slo: frozenset[int] = frozenset()  # of these, by id
        # By sequence: earliest step in which its timed drafters are considered, and how many steps it waited for that.
        self._waits: dict[int, tuple[int, int]] = {}
        self._saved_seconds = 0.0  # time that the drafts of this step should save
        self._poll_length = float(tuning.new_drafter_tokens)  # tokens that free drafters are asked for
        self._held = HeldChoice()

    # What is asked before a step.

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self._skip_reasons.clear()
        limiter, plain_seconds = self.poll_limiter, self.costs.single_row_seconds
        decoding = [seq for seq in seqs if seq.request.drafters and seq.is_decoding]
        polled = limiter.select(decoding, plain_seconds)
        behind_slo = self.slo.late(seqs, plain_seconds)
        self._behind_slo = frozenset(seq.id for seq in behind_slo if seq in decoding)
        for seq in decoding if self._behind_slo else ():
            if seq.id in self._behind_slo and not limiter.was_polled(seq.id):
                limiter.force(seq)
                polled.append(seq)
        if self._timed and len(polled) < len(decoding):
            polled_ids = {seq.id for seq in polled}
            others = [seq for seq in decoding if seq.id not in polled_ids and self._waits_no_longer(seq)]
            self._considered = polled + others
        else:
            self._considered = polled
        self._considered = [seq for seq in self._considered if self.settings.max_length(seq)]
        if len(self._considered) < len(decoding):
            self._record_unpolled(seqs, decoding)
        if not self._considered:
            self.host_gap.observe_savings(0.0)
            return [], 0
        for seq in self._considered:
            request = self._requests.get(seq.id)
            if request is None:
                request = self.acceptance.request(request_class_of(seq), seq.request.drafters)
                self._requests[seq.id] = request
            request.resolve(seq.tokens)
        with_free = [seq for seq in polled if not self._free.isdisjoint(seq.request.drafters)]
        limit = self.settings.max_draft_tokens
        return with_free, limit if self.settings.fixed_length is not None else min(limit, int(self._poll_length))

    def _waits_no_longer(self, seq: Sequence) -> bool:
        """Return whether the timed drafters of a sequence that is not polled are considered in this step."""
        step, _ = self._waits.get(seq.id, (0, 0))
        return step <= self.poll_limiter.step and not self._free.issuperset(seq.request.drafters)

    def _record_unpolled(self, seqs: list[Sequence], decoding: list[Sequence]) -> None:
        considered = {seq.id for seq in self._considered}
        self.decisions.record_unpolled([seq.request.drafters for seq in decoding if seq.id not in considered])
        if not considered and self.settings.fixed_length is None:
            self.decisions.record_step(False, lambda: self._explain(self.options.view(seqs), decoding))

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        """Return the drafter and the draft length of each sequence; sequences that are not considered get none."""
        considered = self._considered
        if not considered:
            return [NO_BUDGET] * len(seqs)
        if self.settings.fixed_length is not None:
            length = self.settings.fixed_length(sum(seq.pending == 1 for seq in seqs))
            budgets = {
                seq.id: self._fixed_budget(seq, free_drafts.get(seq.id, NO_DRAFTS), length) for seq in considered
            }
        elif self.costs.is_known:
            held = self._reuse(seqs, free_drafts)
            budgets = self._adapt(seqs, free_drafts) if held is None else held
        else:  # the first step is plain and measures the cost of one
            budgets = {}
            for seq in considered:
                self._record_decision(seq, NO_DRAFTS, "", NO_COSTS)
        for seq in considered:
            if seq.id not in budgets and seq.request.params.structured_outputs is not None:
                budgets[seq.id] = Budget(self.settings.max_length(seq))  # for tokens that a grammar forces
        self._finish_polls(free_drafts)
        if len(seqs) == 1:
            return [budgets.get(seqs[0].id, NO_BUDGET)]
        return [budgets.get(seq.id, NO_BUDGET) for seq in seqs]

    def _reuse(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> dict[int, Budget] | None:
        """Return the budgets of the last choice if it still stands, or None."""
        if self._behind_slo or self.loader.unavailable or any(map(any, free_drafts.values())):
            return None
        budgets = self._held.reuse(seqs, self._poll_key(), self.settings.max_length)
        if budgets is None:
            return None
        for seq in self._considered:
            if self.poll_limiter.was_polled(seq.id):
                self.poll_limiter.record_payoff(seq.id, 0.0)
            self._record_decision(seq, NO_DRAFTS, budgets.get(seq.id, NO_BUDGET).drafter, PAYS)
        self.exploration.record_step(bool(budgets))
        self.decisions.record_step(bool(budgets), lambda: self._explain(self.options.view(seqs), self._considered))
        return budgets

    def _poll_key(self) -> tuple[tuple[int, bool], ...]:
        """Return the sequences that may draft, and whether each was polled."""
        return tuple([(seq.id, self.poll_limiter.was_polled(seq.id)) for seq in self._considered])

    def _adapt(self, seqs: list[Sequence], free_drafts: FreeDrafts, in_flight: bool = False) -> dict[int, Budget]:
        """Return the budgets that maximise expected tokens per second. `in_flight`: the step is already in flight."""
        considered, view = self._considered, self.options.view(seqs)
        margin, throughput = self.settings.margin, self.settings.throughput
        free_options, timed_options = [], []
        for seq in considered:
            request = self._requests[seq.id]
            request.free_confidence, found = None, list[DrafterOption]()
            if self._free and self.poll_limiter.was_polled(seq.id) and not self._free.isdisjoint(seq.request.drafters):
                found = self.options.free(seq, request, free_drafts.get(seq.id, NO_DRAFTS))
            free_options.append(found)
            timed_options.append(self.options.timed(view, seq, request) if self._timed else [])
        options = [free + timed for free, timed in zip(free_options, timed_options, strict=True)]
        urgent: list[bool] = []
        if self._behind_slo:
            urgent = [self._can_catch_up(view, seq, mine) for seq, mine in zip(considered, options, strict=True)]
            self._behind_slo = frozenset(seq.id for seq, first in zip(considered, urgent, strict=True) if first)
        choices = choose(view, options, margin, throughput, urgent, self.tuning)
        if self.loader.unavailable:
            choices = self._without_unloaded(view, options, choices, urgent)
        budgets = self._budgets(view, choices)
        lengths = (2 * budget.depth + 1 for budget in budgets.values())
        self._poll_length = max(0.95 * self._poll_length, self.tuning.new_drafter_tokens, *lengths)
        self._record_payoffs(view, choices, timed_options, in_flight)
        self.host_gap.observe_savings(self._saved_seconds)
        held = dict(budgets)
        self._explore(view, choices, budgets, free_drafts, in_flight)
        known = all(request.rates[name].group.is_familiar for name in self._timed if name in request.rates)
        hold = self.tuning.hold_steps if known and budgets == held and not in_flight else 0
        self._held = HeldChoice(self._poll_key(), len(seqs), held, hold)
        return budgets

    def _can_catch_up(self, view: StepCostView, seq: Sequence, options: list[DrafterOption]) -> bool:
        """Return whether a sequence is behind its SLO and can still meet it if no other one drafted."""
        if seq.id not in self._behind_slo:
            return False
        alone = replace(view, num_decoding=1)
        speed = best_choice(alone, options, self.settings.margin, self.tuning).speedup / alone.plain_seconds
        return self.slo.can_catch_up(seq, self.costs.single_row_seconds, speed)

    def _without_unloaded(
        self, view: StepCostView, options: list[list[DrafterOption]], choices: list[Choice], urgent: list[bool]
    ) -> list[Choice]:
        """Request the chosen drafters that are unloaded, and choose again without them."""
        unavailable = self.loader.unavailable
        if not any(choice.drafter in unavailable for choice in choices):
            return choices
        for drafter in sorted({choice.drafter for choice in choices} & unavailable):
            self._request_load(drafter)
        options = [[each for each in mine if each.drafter not in unavailable] for mine in options]
        return choose(view, options, self.settings.margin, self.settings.throughput, urgent, self.tuning)

    def _budgets(self, view: StepCostView, choices: list[Choice]) -> dict[int, Budget]:
        """Return the budgets of the sequences that draft."""
        budgets: dict[int, Budget] = {}
        self._saved_seconds, least = 0.0, max(1, self.settings.min_draft_tokens)
        for seq, choice in zip(self._considered, choices, strict=True):
            if choice.nodes < least:
                self._wait(seq)
                continue
            self._waits.pop(seq.id, None)
            self._saved_seconds += (choice.speedup - 1) * view.plain_share
            if choice.prices is None:
                budgets[seq.id] = Budget(choice.nodes, choice.drafter)
                continue
            is_single_graph = self.draft_latency.is_single_graph(choice.drafter, seq)
            threshold = min_probability(view, choice, is_single_graph, self.tuning)
            budgets[seq.id] = Budget(choice.nodes, choice.drafter, threshold, max_depth=choice.levels)
        return budgets

    def _wait(self, seq: Sequence) -> None:
        """Consider a sequence's timed drafters less and less often while they do not pay (exponential backoff)."""
        step, (until, waited) = self.poll_limiter.step, self._waits.get(seq.id, (0, 0))
        if until <= step:
            waited = min(max(8, 2 * waited), self.tuning.probe_interval)
            self._waits[seq.id] = step + waited, waited

    def _record_payoffs(
        self, view: StepCostView, choices: list[Choice], timed: list[list[DrafterOption]], in_flight: bool
    ) -> None:
        """Credit polls with what free drafts should save beyond the best timed draft."""
        limiter = self.poll_limiter
        for seq, choice, options in zip(self._considered, choices, timed, strict=True):
            if not limiter.was_polled(seq.id):
                continue
            if in_flight:
                limiter.record_payoff(seq.id, 0.0, late=True)
                if choice.nodes:
                    limiter.poll_next_step(seq.id)
                continue
            gain = 0.0
            if choice.nodes and choice.drafter in self._free:
                other = best_choice(view, options, self.settings.margin, self.tuning) if options else PLAIN
                gain = (choice.speedup - other.speedup) * view.plain_share
            limiter.record_payoff(seq.id, gain)

    def _explore(
        self,
        view: StepCostView,
        choices: list[Choice],
        budgets: dict[int, Budget],
        free_drafts: FreeDrafts,
        in_flight: bool,
    ) -> None:
        """Turn the step into a baseline step or add probes, if due; then record the decisions."""
        compared: set[int] = set()
        speedup = max([choice.speedup for choice in choices])
        if budgets and not self._behind_slo and not in_flight and self.exploration.wants_baseline(speedup):
            compared = set(budgets)
            budgets.clear()
        probed = self._probe(view, budgets, in_flight) if self._timed and not compared else ()
        for seq in self._considered:
            if seq.id in compared:
                reason = BASELINE
            elif in_flight and seq.id in budgets:
                reason = LATE
            elif seq.id in probed:
                reason = PROBE
            else:
                reason = SLO if seq.id in self._behind_slo else PAYS
            drafter = "" if in_flight else budgets.get(seq.id, NO_BUDGET).drafter
            self._record_decision(seq, free_drafts.get(seq.id, NO_DRAFTS), drafter, reason)
        self.exploration.record_step(bool(budgets) and not in_flight)
        self.decisions.record_step(bool(budgets or compared), lambda: self._explain(view, self._considered))

    def _probe(self, view: StepCostView, budgets: dict[int, Budget], in_flight: bool) -> set[int]:
        """Add short drafts by timed drafters that were not used for long, each for one sequence."""
        probed: set[int] = set()
        used, step = {budget.drafter for budget in budgets.values()}, self.poll_limiter.step
        for drafter in self._timed:
            if not self.exploration.is_idle(drafter, drafter in used, step):
                continue
            able = [seq for seq in self._considered if drafter in seq.request.drafters]
            if not able:
                continue
            seq = min(able, key=lambda each: self.draft_latency.prefill_tokens(each, drafter))
            length = max(self.tuning.probe_tokens, self.settings.min_draft_tokens)
            nodes, prefill = min(length, self.settings.max_length(seq)), self.draft_latency.prefill_tokens(seq, drafter)
            seconds = self.draft_costs[drafter].seconds(nodes, nodes, prefill, view.plain_seconds)
            seconds += view.extra_seconds(nodes)
            unloaded = drafter in self.loader.unavailable
            if (in_flight and not unloaded) or not self.exploration.begin_probe(
                drafter, step, seconds, view.plain_seconds
            ):
                if in_flight:
                    budgets.setdefault(seq.id, Budget(nodes, drafter, is_exploration=True))
                    self._waits.pop(seq.id, None)  # the next step makes the probe
                continue
            if unloaded:
                self._request_load(drafter)
                continue
            budgets[seq.id] = Budget(nodes, drafter, is_exploration=True)
            probed.add(seq.id)
        return probed

    def _request_load(self, drafter: str) -> None:
        self.draft_latency.forget_drafter(drafter)
        self.loader.request_load(drafter)

    def _finish_polls(self, free_drafts: FreeDrafts) -> None:
        for seq in self._considered:
            drafts = free_drafts.get(seq.id)
            if drafts:
                self._requests[seq.id].add_free(seq, drafts)
        self.poll_limiter.finish_polls()

    def _fixed_budget(self, seq: Sequence, free_drafts: Mapping[str, Draft], length: int) -> Budget:
        """Return a budget of a fixed length with the drafter that has the most expected accepted tokens."""
        length, request = min(length, self.settings.max_length(seq)), self._requests[seq.id]
        expected = {"": 0.0}
        for drafter in seq.request.drafters:
            if drafter in self.loader.unavailable:
                self._request_load(drafter)
            elif drafter not in self._free:
                expected[drafter] = sum(request.chain_probs(drafter, length, optimistic=False))
            elif len(seq.request.drafters) == 1:
                expected[drafter] = 1.0
            elif drafter in free_drafts:
                expected[drafter] = sum(request.free_probs(drafter, free_drafts[drafter].truncate(length)))
        drafter = max(expected, key=expected.__getitem__) if length else ""
        self._record_decision(seq, free_drafts, drafter, FIXED)
        if not drafter:
            return NO_BUDGET
        nodes = self.settings.max_nodes(seq, len(self._considered)) if self.traits[drafter].makes_trees else 0
        return Budget(nodes, drafter, max_depth=length) if nodes > length else Budget(length, drafter)

    def _record_decision(self, seq: Sequence, free_drafts: Mapping[str, Draft], drafter: str, reason: str) -> None:
        drafters = seq.request.drafters
        with_draft = [name for name in drafters if name in free_drafts or name not in self._free]
        polled = self.poll_limiter.was_polled(seq.id)
        unpolled = () if polled else [name for name in drafters if name in self._free]
        self._skip_reasons[seq.id] = self.decisions.record_sequence(drafters, with_draft, unpolled, drafter, reason)

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
        budgets = self._adapt(seqs, free_drafts, in_flight=True)
        self._finish_polls(free_drafts)
        return not any(each.nodes > 1 or each.drafter not in self._free for each in budgets.values())

    # What is learned after a step.

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Drop drafts that are too short, unless a token was sampled: dropping it for its value would be a bias."""
        least = self.settings.min_draft_tokens
        if not least:
            return drafts
        return [Draft() if len(draft) < least and not any(draft.sampled or ()) else draft for draft in drafts]

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        if times.host_gap is not None and not times.is_outlier:
            timed = any(
                each.scheduled.budget.nodes and each.scheduled.budget.drafter in self._timed for each in results
            )
            self.host_gap.observe(len(results), times.host_gap, timed)
        rows = budgeted = 0
        only_decoding = True
        for result in results:
            scheduled = result.scheduled
            rows += scheduled.num_new_tokens + len(result.draft.parents)
            budgeted += scheduled.budget.nodes
            only_decoding &= scheduled.num_new_tokens == 1
        self.host_gap.observe_step(len(results), budgeted > 0, self.clock(), times if only_decoding else None)
        # A prefill step says little about the cost of one row, so the latency model does not start with one.
        if not times.is_outlier and (only_decoding or self.costs.is_known) and self.costs.should_observe(rows):
            context = sum([each.scheduled.start for each in results])
            pairs = [each.scheduled.start * (each.scheduled.num_new_tokens + len(each.draft) - 1) for each in results]
            self.costs.observe(rows, context, times.target_seconds, sum(pairs))
        if budgeted and self._timed and self.costs.is_known:
            seconds = times.draft_seconds if times.propose_seconds is None else times.propose_seconds
            measured = None if times.is_outlier else seconds
            self.draft_latency.observe(results, measured, self.costs.single_row_seconds)
        for result in results if self._considered else ():
            request = self._requests.get(result.scheduled.seq.id)
            if request is not None and result.verify_result is not None:
                if result.scheduled.budget.nodes:
                    self._observe_draft(request, result)
                request.resolve(result.scheduled.seq.tokens)

    def _observe_draft(self, request: RequestAcceptance, result: StepResult) -> None:
        """Follow the draft of a timed drafter; free ones are followed already."""
        scheduled, draft = result.scheduled, result.draft
        drafter = scheduled.budget.drafter
        if drafter not in request.rates or drafter in self._free or draft.source not in (drafter, ""):
            return
        rates = request.rates[drafter]
        if not len(draft):  # its time was spent and it drafted nothing: as bad as a rejected token
            rates.count(FIRST_TOKEN, False)
            return
        request.open.append(OpenDraft(rates, draft, scheduled.length, scheduled.budget, request.free_confidence))
        if result.num_accepted:
            self.exploration.reset_backoff(drafter)

    def learns_from(self, seq: Sequence) -> bool:
        return bool(seq.request.drafters) and self.poll_limiter.was_polled(seq.id)

    def forget(self, seq: Sequence) -> None:
        request = self._requests.pop(seq.id, None)
        if request is not None:
            request.resolve(seq.tokens)
        self.poll_limiter.forget(seq.id)
        self.draft_latency.forget(seq.id)
        self.slo.forget(seq.id)
        self._skip_reasons.pop(seq.id, None)
        self._waits.pop(seq.id, None)

    # What can be seen from outside.

    def _explain(self, view: StepCostView, seqs: list[Sequence]) -> str:
        """Return why speculation is on or off, for the log."""
        ((request_class, _),) = Counter(map(request_class_of, seqs)).most_common(1)
        rates = {}
        for drafter in sorted({drafter for seq in seqs for drafter in seq.request.drafters}):
            prices = None if drafter in self._free else self.draft_costs[drafter].prices(view.plain_seconds)
            rate = self.acceptance.class_rates(drafter, request_class).rate(FIRST_TOKEN)
            rates[drafter] = rate, view.break_even(prices)
        is_sampled = any(seq.request.params.temperature > 0 for seq in seqs)
        return self.decisions.explain(rates, view.num_decoding, self.settings.min_draft_tokens, is_sampled)

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
