"""Guesses as far as it pays, by what steps cost here and what stood in this request; not at all where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from foretell.types import Budget, Draft, ScheduledSequence, Sequence, StepResult, StepTimes

from .acceptance_model import ALIKE, TRUST, AcceptancePrior
from .acceptance_tracker import Acceptance, AcceptanceObserver, kind_of
from .controller import Always, Controller, FreeDrafts
from .decision_log import (
    COMPARED,
    FIXED,
    HURRY,
    LATE,
    NOT_ASKED,
    PAYS,
    SKIPPED,
    TRIAL,
    UNKNOWN,
    Decision,
    DecisionLog,
    Situation,
    in_words,
)
from .draft_latency import Drafting
from .drafter_options import UNTRIED, DrafterOptions, PlanCache
from .exploration import BaselineSteps, DrafterExploration
from .latency_model import HostGap, StepCosts
from .length_optimizer import PLAIN, DraftPlan, StepCostView, best_plan, break_even, given, let_pass, share_out
from .poll_limiter import PollLimiter
from .settings import TREE_ROWS, AllHere, ControllerSettings, DrafterTraits, Presence
from .slo import SloTracker

SMALL = 64  # rows of a prompt that are counted in a step to be planned; a prompt's chunk is not known yet
STRETCH_EVERY = 24  # of so many drafts one goes a node farther
FADING = 0.95  # nodes that are hardly ever taken are not guessed: a tree of sixteen costs the host as much as a row
NOTHING = Budget()


class AdaptiveController(Controller):
    """Maximises expected tokens per second over the whole batch. It looks at the past and at free guesses alone."""

    def __init__(
        self,
        arms: Mapping[str, DrafterTraits],
        settings: ControllerSettings = ControllerSettings(),
        costs: StepCosts | None = None,
        clock: Callable[[], float] = perf_counter,
        presence: Presence = AllHere(),
    ) -> None:
        self.arms, self.settings, self.presence = dict(arms), settings, presence
        self.costs = costs or StepCosts()
        self.drafting, self.patience = Drafting(arms), PollLimiter(clock)
        self.draft_costs = self.drafting.costs
        beliefs = {
            name: AcceptancePrior(traits.prior, TRUST if traits.free else ALIKE) for name, traits in arms.items()
        }
        self.acceptance = Acceptance(beliefs)
        self.decisions, self.probes, self.hurry = DecisionLog(), DrafterExploration(), SloTracker(clock)
        self.lessons = AcceptanceObserver(self.acceptance, self.drafting.is_paid, self.probes.succeeded)
        self.yardstick, self.waits = BaselineSteps(), HostGap()
        self.prospects = DrafterOptions(self.arms, settings, self.lessons, self.drafting)
        self.foresight = PlanCache(self.prospects)
        self.always = Always(self.arms, settings, self.lessons, presence, self._call)
        self._free = self.drafting.free
        self._paid = sorted(arm for arm in arms if arm not in self._free)
        self._all_free = self._free.issuperset(arms)
        self._trees = any(traits.grows and not traits.free for traits in arms.values())
        self._drafts: Counter[str] = Counter()
        self._why: dict[int, str] = {}
        self._due: list[Sequence] = []  # looked at in this step
        self._worth: dict[int, float] = {}  # seconds that the guesses of this step should save
        self._reach = float(UNTRIED)  # nodes that free drafters are asked for
        self._hurried: frozenset[int] = frozenset()  # of them those behind the speed they asked for

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self.lessons.begin()
        self._why.clear()
        writers = [seq for seq in seqs if seq.request.drafters and seq.is_decoding]
        late = self.hurry.behind(seqs, self.costs.single)
        self._due, self._hurried = self.patience.due(writers, self.costs.single) if writers else [], frozenset()
        if late:
            self._wake(late)
        if self._due:
            self._due = [seq for seq in self._due if self.settings.cap(seq)]
        if len(self._due) < len(writers):
            self._leave_alone(seqs, writers)
        if not self._due:
            self.waits.hope(0.0)
            return [], 0
        for seq in self._due:
            self.lessons.find_out(seq)
        asked = [seq for seq in self._due if not self._free.isdisjoint(seq.request.drafters)]
        reach = self._reach if self.settings.fixed is None else self.settings.most
        return asked, min(self.settings.most, int(reach))

    def _wake(self, late: list[Sequence]) -> None:
        """Look at those that are behind the speed they asked for."""
        behind = [seq for seq in late if seq.request.drafters and seq.is_decoding]
        self._hurried = frozenset(seq.id for seq in behind)
        for seq in behind:
            if self.patience.left_alone(seq.id):
                self.patience.wake(seq)
                self._due.append(seq)

    def _leave_alone(self, seqs: list[Sequence], writers: list[Sequence]) -> None:
        """Count whom nobody looks at in this step."""
        asleep = [seq for seq in writers if self.patience.left_alone(seq.id)] if self._due else writers
        self.decisions.left_alone([seq.request.drafters for seq in asleep])
        if not self._due and self.settings.fixed is None:
            self.decisions.step(False, lambda: self._reason(self._market(seqs), writers))

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        """Whom `asks` left alone is left alone here, too."""
        due = self._due
        if not due:
            return [NOTHING] * len(seqs)
        if self.settings.fixed is not None:
            writers = sum(seq.pending == 1 for seq in seqs)
            found = self._fixed(due, offers, self.settings.fixed(writers))
        elif self.costs.known:
            found = self._weighed(seqs, due, offers)
            for seq in due:
                self.patience.note(seq.id, self._worth.get(seq.id, 0.0))
        else:  # the first step tells what steps cost
            found = {}
            for seq in due:
                self._why[seq.id] = UNKNOWN
                for arm in seq.request.drafters:
                    self.decisions.note(arm, SKIPPED, UNKNOWN)
        for seq in due:
            if seq.id not in found and seq.request.params.structured_outputs is not None:
                found[seq.id] = Budget(self.settings.cap(seq))  # room for what a grammar forces, which always stands
        self._looked(due, offers)
        return [found.get(seq.id, NOTHING) for seq in seqs]

    def _weighed(
        self, seqs: list[Sequence], due: list[Sequence], offers: FreeDrafts, late: bool = False
    ) -> dict[int, Budget]:
        if self._all_free and not self._hurried and not any(offers.values()):
            found = self._passed(seqs, due)
        else:
            found = self._adapted(self._market(seqs), due, offers, late)
        self.waits.hope(sum(self._worth.values()))
        return found

    def _looked(self, due: list[Sequence], offers: FreeDrafts) -> None:
        for seq in due:
            self.lessons.note_offers(seq, offers.get(seq.id, {}))
        self.patience.done()

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """A step that begins early saves what the device would wait for the host; it can guess nothing."""
        if super().expects_plain_step(seqs):
            return True
        adapts = self.settings.fixed is None and self.costs.known and not self._hurried
        return adapts and self.waits.outweigh_guesses(len(seqs))

    def keeps_plain(self, seqs: list[Sequence], offers: FreeDrafts) -> bool:
        """A single free guess is for the step that runs, and of no use for the next."""
        due = self._due
        if not due:
            return True
        if self.settings.fixed is not None or not self.costs.known:
            return False
        found = self._weighed(seqs, due, offers, late=True)
        for seq in due:
            self.patience.note(seq.id, 0.0, late=True)
        for seq_id in found:
            self.patience.recall(seq_id)
        self._looked(due, offers)
        return not any(each.nodes > 1 or each.drafter not in self._free for each in found.values())

    def learns_from(self, seq: Sequence) -> bool:
        return bool(seq.request.drafters) and not self.patience.left_alone(seq.id)

    def _market(self, seqs: list[Sequence]) -> StepCostView:
        writers = rows = cached = 0
        for seq in seqs:
            pending = len(seq.tokens) - seq.cached
            writers += pending == 1
            rows += min(pending, SMALL)
            cached += seq.cached
        widest = max(self.settings.most, self._trees and min(self.settings.tree, TREE_ROWS // max(1, writers)))
        curve = self.costs.prices(rows + writers * widest)
        # Each further row looks at what is cached of its text.
        sizes = self.costs.sizes if rows == 1 else ()
        held, further = self.costs.looking(cached), self.costs.pair * cached / len(seqs)
        waiting = self.waits.seconds(writers)
        return StepCostView(writers, rows, curve, held, further, waiting, self.waits.hidden(writers), sizes)

    def _adapted(
        self, market: StepCostView, due: list[Sequence], offers: FreeDrafts, late: bool = False
    ) -> dict[int, Budget]:
        """`late`: what should be guessed in the next step, for this one is under way."""
        first = self._with_priority(market, due, offers) if self._hurried else {}
        plans = [first.get(seq.id) or self._plan(market, seq, offers.get(seq.id, {})) for seq in due]
        hurried = [seq.id in first for seq in due]
        found = self._found(market, due, plans, self._shared(market, plans, hurried), late)
        self._reach = max(FADING * self._reach, UNTRIED, *(2 * budget.depth + 1 for budget in found.values()))
        gain = max(plan.gain for plan in plans)
        compared = set()
        if found and not self._hurried and not late and self.yardstick.wanted(self.costs.steps, gain):
            compared = set(found)
            found.clear()
        trials = set() if compared else self._probe(market, due, found, late)
        for seq in due:
            why = TRIAL if seq.id in trials else HURRY if seq.id in self._hurried else PAYS
            why = COMPARED if seq.id in compared else LATE if late and seq.id in found else why
            taken, offered = "" if late else found.get(seq.id, NOTHING).drafter, offers.get(seq.id, {})
            guessed = [arm for arm in seq.request.drafters if arm in offered or arm not in self._free]
            self._why[seq.id] = self.decisions.note_all(seq.request.drafters, guessed, taken, why)
        self.yardstick.note(bool(found) and not late)
        self.decisions.step(bool(found or compared), lambda: self._reason(market, due))
        return found

    def _with_priority(self, market: StepCostView, due: list[Sequence], offers: FreeDrafts) -> dict[int, DraftPlan]:
        """Plan sequences behind their SLO as if no other one drafted; priority ends for those that miss it even so."""
        alone = replace(market, writers=1)
        plans = {seq.id: self._plan(alone, seq, offers.get(seq.id, {})) for seq in due if seq.id in self._hurried}
        for seq in due:
            plan = plans.get(seq.id)
            if plan is not None and not self.hurry.stays_behind(seq, self.costs.single, plan.gain / alone.plain):
                del plans[seq.id]
        self._hurried = frozenset(plans)
        return plans

    def _passed(self, seqs: list[Sequence], due: list[Sequence]) -> dict[int, Budget]:
        """Nobody has a guess, which is the usual case where guesses are rare, and nothing is to be weighed."""
        self._worth.clear()
        self._reach = max(FADING * self._reach, UNTRIED)
        for seq in due:
            self._why[seq.id] = self.decisions.note_all(seq.request.drafters, (), "", PAYS)
        self.yardstick.note(False)
        self.decisions.step(False, lambda: self._reason(self._market(seqs), due))
        return {}

    def _found(
        self, market: StepCostView, due: list[Sequence], plans: list[DraftPlan], nodes: list[int], late: bool
    ) -> dict[int, Budget]:
        """Budgets of those who guess, and what that should save."""
        found: dict[int, Budget] = {}
        self._worth.clear()
        for seq, plan, count in zip(due, plans, nodes, strict=True):
            if count and count >= self.settings.shortest:
                self._worth[seq.id] = (given(market, plan, count) - 1) * market.plain / market.writers
                farther = 0 if late else self._stretch(seq, plan, min(count, plan.depth))
                found[seq.id] = self._budget(market, seq, plan, count, farther)
                self.lessons.expect(seq, plan.survival)
        return found

    def _budget(self, market: StepCostView, seq: Sequence, plan: DraftPlan, nodes: int, farther: int) -> Budget:
        """`farther`: levels to be tried behind those planned."""
        if nodes <= plan.depth:
            return Budget(nodes + farther, plan.arm, self.drafting.floor(market, seq, plan.arm))
        most, filling = self.settings.tree_cap(seq, market.writers), bool(market.sizes)
        wanted = nodes if filling else nodes + farther
        farther = farther if plan.depth + farther < max(nodes, min(wanted, most)) else 0  # it stays a tree
        floor = self.drafting.floor(market, seq, plan.arm, tree=True, filling=filling)
        return Budget(max(nodes, min(wanted, most)), plan.arm, floor, max_depth=plan.depth + farther)

    def _plan(self, market: StepCostView, seq: Sequence, offered: Mapping[str, Draft]) -> DraftPlan:
        """The best there is; a better drafter that is away is called."""
        margin, shown = self.settings.margin, self.prospects.shown(seq, offered)
        found = best_plan(market, shown, margin) if shown else PLAIN
        if self._all_free:
            return found
        asked = self.foresight.plan(market, seq)
        if asked.gain > found.gain and asked.arm in (away := self.presence.unavailable):
            self._call(asked.arm)
            asked = best_plan(market, self.prospects.foretold(market, seq, away), margin)
        return asked if asked.gain > found.gain else found

    def _call(self, arm: str) -> None:
        self.drafting.lose(arm)
        self.presence.request_load(arm)

    def _shared(self, market: StepCostView, plans: list[DraftPlan], hurried: list[bool]) -> list[int]:
        """Nodes for each; where somebody is in a hurry, drafters that take time guess for nobody else."""
        throughput, margin = self.settings.throughput, self.settings.margin
        if not any(hurried):
            alone = market.writers == len(plans) == 1  # what is best for it was weighed already
            drafting = 0.0 if alone else self.drafting.for_all(market, plans)
            return share_out(market, plans, drafting, throughput, margin)
        pairs = zip(plans, hurried, strict=True)
        kept = [plan if first or plan.arm in self._free else DraftPlan() for plan, first in pairs]
        return let_pass(market, kept, hurried, throughput, margin)

    @property
    def decision_counts(self) -> dict[Decision, int]:
        return self.decisions.counts

    @property
    def speculation_state(self) -> tuple[bool, str]:
        return self.decisions.on, self.decisions.reason

    @property
    def num_switches(self) -> int:
        return self.decisions.switches

    def _stretch(self, seq: Sequence, plan: DraftPlan, nodes: int) -> int:
        """Now and then farther than it pays: what is never tried is never found out. Free guesses are, all the same."""
        if plan.arm in self._free:
            return 0
        self._drafts[plan.arm] += 1
        return min(0 if self._drafts[plan.arm] % STRETCH_EVERY else 1, self.settings.cap(seq) - nodes)

    def _fixed(self, due: list[Sequence], offers: FreeDrafts, nodes: int) -> dict[int, Budget]:
        found = {}
        for seq in due:
            offered = offers.get(seq.id, {})
            budget = self.always.budget(seq, offered, nodes, len(due))
            if budget.drafter:
                found[seq.id] = budget
            guessed = [name for name in seq.request.drafters if name in offered or name not in self._free]
            self._why[seq.id] = self.decisions.note_all(seq.request.drafters, guessed, budget.drafter, FIXED)
        return found

    def trim(self, plan: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Leave out what is too short, unless it was drawn: to drop a draw for what it led to would be a bias."""
        least = self.settings.shortest
        if not least:
            return drafts
        return [Draft() if len(draft) < least and not any(draft.sampled or ()) else draft for draft in drafts]

    def _probe(self, market: StepCostView, due: list[Sequence], found: dict[int, Budget], late: bool) -> set[int]:
        """Try a drafter that is not used, rarely and for one sequence, so that its day is noticed when it comes."""
        tried: set[int] = set()
        used, step = {budget.drafter for budget in found.values()}, self.patience.step
        for arm in self._paid:
            able = [seq for seq in due if arm in seq.request.drafters]
            if not able or not self.probes.is_rested(arm, arm in used, step):
                continue
            seq = min(able, key=lambda each: self.drafting.behind(each, arm))
            nodes = min(max(DrafterExploration.NODES, self.settings.shortest), self.settings.cap(seq))
            seconds = self.drafting.for_trial(market, seq, arm, nodes)
            cost = seconds + market.extra(nodes), market.plain
            if self.probes.is_due(arm, step, *cost):
                away = arm in self.presence.unavailable
                if away or not late:
                    self.probes.begin(arm, step, *cost)
                if away:
                    self._call(arm)
                    continue
                found[seq.id] = Budget(nodes, arm, is_exploration=True)
                self.lessons.expect(seq, ())
                tried.add(seq.id)
        return tried

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:
        if times.host_gap is not None and not times.is_outlier:
            paid = any(each.scheduled.budget.nodes and each.scheduled.budget.drafter in self._paid for each in outcomes)
            self.waits.observe(len(outcomes), times.host_gap, paid)
        rows = drafted = 0
        for outcome in outcomes:
            rows += outcome.scheduled.num_new_tokens + len(outcome.draft.tokens)
            drafted += outcome.scheduled.budget.nodes
        # A prompt tells little of one row, so it is not what prices begin with.
        usual = self.costs.known or all(outcome.scheduled.num_new_tokens == 1 for outcome in outcomes)
        if not times.is_outlier and self.costs.wants(rows, drafted > 0) and usual:
            context = sum(outcome.scheduled.start for outcome in outcomes)
            pairs = sum(
                each.scheduled.start * (each.scheduled.num_new_tokens + len(each.draft) - 1) for each in outcomes
            )
            self.costs.observe(rows, context, times.target_seconds, pairs)
        if drafted and self.costs.known:
            seconds = times.draft_seconds if times.propose_seconds is None else times.propose_seconds
            self.drafting.observe(outcomes, None if times.is_outlier else seconds, self.costs.single)
        if self._due:
            looked = {seq.id for seq in self._due}
            for outcome in outcomes:
                if outcome.verify_result is not None and outcome.scheduled.seq.id in looked:
                    self.lessons.observe(outcome)

    def _reason(self, market: StepCostView, due: list[Sequence]) -> str:
        arms = sorted({arm for seq in due for arm in seq.request.drafters})
        needs = {arm: break_even(market, self.drafting.node(market, arm)) for arm in arms}
        ((kind, _),) = Counter(map(kind_of, due)).most_common(1)
        rates = {arm: (self.acceptance.first_rate(arm, kind), need) for arm, need in needs.items()}
        samples, seldom = any(seq.request.params.temperature > 0 for seq in due), self.decisions.seldom_guesses(arms)
        now = Situation(market.writers, samples, self.decisions.on, seldom, self.settings.shortest)
        return in_words(rates, now)

    def skip_reason(self, seq: Sequence) -> str:
        return self._why.get(seq.id, NOT_ASKED if self.patience.left_alone(seq.id) else "")

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.costs.seconds(batch, context) if self.costs.known else None

    def forget(self, seq: Sequence) -> None:
        self.lessons.forget(seq)
        self.patience.forget(seq.id)
        self.foresight.forget(seq.id)
        self.drafting.forget(seq.id)
        self.hurry.forget(seq.id)
        self._why.pop(seq.id, None)
