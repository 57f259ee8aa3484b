"""Length optimizer: which drafter drafts for each sequence, and how many tokens.

Two stages. `best_plan` finds the drafter and length with the largest speedup for one sequence, if all others draft
alike. `allocate` then gives out the planned tokens over the batch, the most valuable first, as long as the whole step
gains. Plain Python lists: numpy is slower on arrays this short.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from foretell.types import Budget, Draft, DrafterTraits, Sequence

from .acceptance_model import WIDTHS, cell
from .acceptance_tracker import AcceptanceTracker
from .draft_latency import DraftLatency
from .latency_model import StepCostView
from .settings import ControllerSettings, LengthTuning

DraftSeconds = Callable[[int, int], float]  # seconds of a draft by nodes and depth


@dataclass(frozen=True)
class TreeOptions:
    """Trees that a drafter could make for a sequence."""

    widths: tuple[int, ...]  # nodes per level, narrowest first
    max_nodes: int
    level_probs: Callable[[float], list[float]]  # by width: probability that each level has an accepted node
    draft_seconds: DraftSeconds | None = None


@dataclass(frozen=True)
class DrafterOption:
    """Drafts that one drafter could make for a sequence."""

    drafter: str
    accept_probs: list[float]  # of each node of a chain, or of the draft that a free drafter offers
    draft_seconds: DraftSeconds | None = None  # None if drafting is free
    trees: TreeOptions | None = None  # None if the drafter makes chains only


@dataclass(frozen=True)
class DraftPlan:
    """The draft planned for one sequence and its expected speedup; 0 nodes is plain decoding."""

    drafter: str = ""
    nodes: int = 0
    speedup: float = 1.0
    accept_probs: tuple[float, ...] = ()  # never increasing
    levels: int = 0  # depth of a tree; 0 for a chain and for a free draft

    @property
    def depth(self) -> int:
        return self.levels or self.nodes


PLAIN = DraftPlan()


def best_plan(
    view: StepCostView, options: list[DrafterOption], margin: float, tuning: LengthTuning = LengthTuning()
) -> DraftPlan:
    """Return the fastest drafter and length for a sequence, or PLAIN unless it wins by more than `margin`."""
    best, length, chosen = 1 + margin, 0, None
    plain_share, sequence_seconds, cutoff = view.plain_share, view.sequence_seconds, tuning.chain_cutoff
    for option in options:
        expected, draft_seconds, best_here = 1.0, option.draft_seconds, 0.0
        for nodes, probability in enumerate(option.accept_probs, 1):
            expected += probability
            drafting = 0.0 if draft_seconds is None else draft_seconds(nodes, nodes)
            speedup = expected * plain_share / (sequence_seconds(nodes) + drafting)
            if draft_seconds is not None:
                best_here = max(best_here, speedup)
                if speedup < cutoff * best_here:
                    break  # later tokens cost as much and are accepted less often; only the start can be expensive
            if speedup > best:
                best, length, chosen = speedup, nodes, option
    tree = _best_tree(view, options, best, tuning)
    if tree is not None:
        return tree
    if chosen is None:
        return PLAIN
    # A node is worth no more than those before it, because drafts are always cut at their end.
    return DraftPlan(chosen.drafter, length, best, tuple(accumulate(chosen.accept_probs[:length], min)))


def _best_tree(view: StepCostView, options: list[DrafterOption], best: float, tuning: LengthTuning) -> DraftPlan | None:
    """Return the fastest tree, or None if none is faster than `best`."""
    found: tuple[DrafterOption, int, int, float] | None = None
    for option in options:
        trees = option.trees
        if trees is None:
            continue
        for width in trees.widths:
            best_here = 0.0
            for nodes, depth, expected in _tree_sizes(view, trees, width):
                seconds = 0.0 if trees.draft_seconds is None else trees.draft_seconds(nodes, depth)
                speedup = view.speedup(expected, nodes, seconds)
                best_here = max(best_here, speedup)
                if speedup > best:
                    best, found = speedup, (option, depth, nodes, expected)
                if speedup < tuning.chain_cutoff * best_here:
                    break
            if best_here < tuning.tree_cutoff * best:
                break  # rows are too expensive for wider trees
    if found is None:
        return None
    option, depth, nodes, expected = found
    # A tree that `allocate` cuts to its depth becomes a chain. The further nodes share what the tree adds to that.
    chain = option.accept_probs[:depth]
    more = max(0.0, expected - 1 - sum(chain)) / (nodes - depth)
    probs = tuple(accumulate([*chain, *[more] * (nodes - depth)], min))
    return DraftPlan(option.drafter, nodes, best, probs, depth)


def _tree_sizes(view: StepCostView, trees: TreeOptions, width: int) -> Iterator[tuple[int, int, float]]:
    """Yield nodes, depth and expected tokens of trees of a width, widened by nodes that only fill a padded step."""
    by_width: dict[float, list[float]] = {}
    for depth in range(1, trees.max_nodes // width + 1):
        nodes = min(trees.max_nodes, view.padded_nodes(width * depth))
        padded_width = nodes / depth
        probs = by_width.get(padded_width)
        if probs is None:
            probs = by_width[padded_width] = trees.level_probs(padded_width)
        if depth > len(probs):
            return
        yield nodes, depth, 1 + sum(probs[:depth])


def allocate(
    view: StepCostView,
    plans: list[DraftPlan],
    draft_seconds: float,
    throughput: bool,
    margin: float,
    max_nodes: int | None = None,
) -> list[int]:
    """Return the nodes of each sequence, at most `max_nodes` in all, that make the batch fastest.

    Nodes are taken greedily by their value. `draft_seconds` is paid if any sequence drafts. With `throughput` the value
    is expected tokens; otherwise it is each sequence's time per token, so that no sequence starves.
    """
    if view.num_decoding == 1 and len(plans) == 1 and max_nodes is None:
        return [plans[0].nodes]
    items, num_decoding = sorted(_node_values(plans, throughput), reverse=True)[:max_nodes], view.num_decoding
    best_speed = (num_decoding if throughput else 1.0) / view.plain_seconds * (1 + margin)
    best_count, gained = 0, 0.0
    for count, (value, _) in enumerate(items, 1):
        gained += value
        tokens = num_decoding + gained if throughput else 1 / (1 - gained / num_decoding)
        speed = tokens / (view.plain_seconds + view.extra_seconds(count) + draft_seconds + view.host_gap)
        if speed > best_speed:
            best_speed, best_count = speed, count
    nodes = [0] * len(plans)
    for _, index in items[:best_count]:
        nodes[index] += 1
    return nodes


def _node_values(plans: list[DraftPlan], throughput: bool) -> list[tuple[float, int]]:
    """Return the value of each planned node and the index of its sequence. Values never increase along a draft."""
    items = []
    for index, plan in enumerate(plans):
        expected, least = 1.0, float("inf")
        for probability in plan.accept_probs:
            value = probability if throughput else 1 / expected - 1 / (expected + probability)
            least = min(least, value)
            items.append((least, index))
            expected += probability
    return items


def allocate_with_priority(
    view: StepCostView,
    plans: list[DraftPlan],
    has_priority: list[bool],
    throughput: bool,
    margin: float,
    tuning: LengthTuning = LengthTuning(),
) -> list[int]:
    """Return the nodes of each sequence if some are late on their SLO.

    Those get what they planned, within a bound on the growth of the step. The others get rows that cost almost nothing.
    """
    first = [plan if mine else PLAIN for plan, mine in zip(plans, has_priority, strict=True)]
    limit = view.free_rows(tuning.slo_step_growth)
    nodes = [plan.nodes for plan in first]
    if sum(nodes) > limit:  # keep the nodes that are most likely accepted
        nodes = [0] * len(plans)
        for _, index in sorted(_node_values(first, True), reverse=True)[:limit]:
            nodes[index] += 1
    rest = replace(view, rows=min(view.rows + sum(nodes), len(view.curve) - 1))
    others = [PLAIN if mine else plan for plan, mine in zip(plans, has_priority, strict=True)]
    further = allocate(rest, others, 0.0, throughput, 0.0, rest.free_rows(margin))
    return [mine + other for mine, other in zip(nodes, further, strict=True)]


def planned_speedup(view: StepCostView, plan: DraftPlan, nodes: int) -> float:
    """Return the expected speedup of a sequence that was given `nodes` of its planned nodes."""
    if nodes >= plan.nodes:
        return plan.speedup
    return min(plan.speedup, view.speedup(1 + sum(plan.accept_probs[:nodes]), nodes))


class LengthOptimizer:
    """Builds the options of each sequence from the acceptance and latency models, and turns plans into budgets."""

    def __init__(
        self,
        traits: Mapping[str, DrafterTraits],
        settings: ControllerSettings,
        tracker: AcceptanceTracker,
        draft_latency: DraftLatency,
        tuning: LengthTuning = LengthTuning(),
    ) -> None:
        self.traits, self.settings, self.tracker, self.draft_latency = traits, settings, tracker, draft_latency
        self.acceptance, self.tuning = tracker.acceptance, tuning

    def free_options(self, seq: Sequence, free_drafts: Mapping[str, Draft]) -> list[DrafterOption]:
        """Return the drafts that free drafters offer, and note their confidence for timed drafters."""
        limit, request, free = self.settings.max_length(seq), self.tracker.request(seq), self.draft_latency.free
        found = [
            DrafterOption(drafter, self.acceptance.accept_probs(request, drafter, free_drafts[drafter].truncate(limit)))
            for drafter in seq.request.drafters
            if drafter in free and drafter in free_drafts
        ]
        if not free.isdisjoint(seq.request.drafters):
            first_probs = (each.accept_probs[0] for each in found if each.accept_probs)
            self.tracker.set_free_confidence(seq, max(first_probs, default=0.0))
        return found

    def timed_drafters(self, seq: Sequence) -> list[str]:
        """Return the drafters of a request whose drafts take time."""
        return [drafter for drafter in seq.request.drafters if drafter not in self.draft_latency.free]

    def timed_options(self, view: StepCostView, seq: Sequence, unavailable: Container[str] = ()) -> list[DrafterOption]:
        """Return the expected drafts of timed drafters, as chains and, where they make them, as trees."""
        limit = self.settings.max_length(seq)
        return [
            self._timed_option(view, seq, drafter, limit)
            for drafter in self.timed_drafters(seq)
            if drafter not in unavailable
        ]

    def _timed_option(self, view: StepCostView, seq: Sequence, drafter: str, limit: int) -> DrafterOption:
        new_tokens = self.tuning.new_drafter_tokens
        is_new = self.acceptance.trials(self.tracker.request(seq), drafter) < new_tokens
        length = min(limit, new_tokens) if is_new else limit
        probs = self.tracker.expected_accept_probs(seq, drafter, length)
        seconds = self.draft_latency.sequence_seconds(view, seq, drafter, is_new)
        trees = None if is_new or not self.traits[drafter].makes_trees else self._trees(view, seq, drafter, length)
        return DrafterOption(drafter, probs, seconds, trees)

    def _trees(self, view: StepCostView, seq: Sequence, drafter: str, max_depth: int) -> TreeOptions | None:
        max_nodes, request = self.settings.max_nodes(seq, view.num_decoding), self.tracker.request(seq)
        widths = tuple(width for width in WIDTHS if width <= max_nodes)
        if not widths:
            return None

        def level_probs(width: float) -> list[float]:
            return self.acceptance.tree_level_probs(request, drafter, max_depth, width)

        seconds = self.draft_latency.sequence_seconds(view, seq, drafter, is_new=False, tree=True)
        return TreeOptions(widths, max_nodes, level_probs, seconds)

    def lengths(self, view: StepCostView, plans: list[DraftPlan], has_priority: list[bool]) -> list[int]:
        """Return the nodes of each sequence. If one has priority, timed drafters draft for no other one."""
        throughput, margin = self.settings.throughput, self.settings.margin
        if not any(has_priority):
            alone = view.num_decoding == len(plans) == 1  # drafting is already in its plan
            draft_seconds = 0.0 if alone else self._batch_draft_seconds(view, plans)
            return allocate(view, plans, draft_seconds, throughput, margin)
        free = self.draft_latency.free
        kept = [
            plan if first or plan.drafter in free else PLAIN for plan, first in zip(plans, has_priority, strict=True)
        ]
        return allocate_with_priority(view, kept, has_priority, throughput, margin, self.tuning)

    def _batch_draft_seconds(self, view: StepCostView, plans: list[DraftPlan]) -> float:
        """Return the seconds of all planned drafts, without prefill, which the plans have taken into account."""
        latency, total = self.draft_latency, 0.0
        shapes = {(plan.drafter, plan.levels > 0) for plan in plans if plan.nodes and plan.drafter not in latency.free}
        for drafter, tree in shapes:
            same = [plan for plan in plans if plan.drafter == drafter and (plan.levels > 0) == tree]
            depth, nodes = max(plan.depth for plan in same), sum(plan.nodes for plan in same)
            total += latency.costs_of(drafter, tree).seconds(depth, nodes, 0, view.plain_seconds)
        return total - view.hidden_gap if total else 0.0

    def budget(self, view: StepCostView, seq: Sequence, plan: DraftPlan, nodes: int, longer: int) -> Budget:
        """Return the budget for `nodes` of a plan. `longer` levels are added to learn about greater depths."""
        drafter, latency = plan.drafter, self.draft_latency
        if nodes <= plan.depth:
            return Budget(nodes + longer, drafter, latency.min_probability(view, seq, drafter))
        padding = bool(view.padded_sizes)
        max_nodes = self.settings.max_nodes(seq, view.num_decoding)
        nodes = max(nodes, min(nodes if padding else nodes + longer, max_nodes))
        if plan.depth + longer >= nodes:  # it would no longer be a tree
            longer = 0
        min_probability = latency.min_probability(view, seq, drafter, tree=True, padding=padding)
        return Budget(nodes, drafter, min_probability, max_depth=plan.depth + longer)


@dataclass(slots=True)
class _CachedPlan:
    """A plan, the situation it was made for, and the polls for which it may still be used."""

    plan: DraftPlan
    situation: tuple[int, int, bool]
    polls: int

    def is_valid(self, situation: tuple[int, int, bool], max_length: int) -> bool:
        return self.polls > 0 and self.situation == situation and self.plan.depth <= max_length


class PlanCache:
    """Best plan of each sequence with timed drafters, reused for a few polls because planning costs host time."""

    def __init__(self, optimizer: LengthOptimizer, familiar: float) -> None:
        """`familiar` is the number of trials from which on one more observation changes little."""
        self.optimizer, self.familiar = optimizer, familiar
        self._plans: dict[int, _CachedPlan] = {}

    def best_timed_plan(self, view: StepCostView, seq: Sequence) -> DraftPlan:
        """Return the best plan with a timed drafter.

        It is made again if the batch size changes, if a prefill starts or ends to use the rows that would pad a step,
        if the confidence of free drafts changes, or if the plan exceeds the remaining tokens.
        """
        optimizer = self.optimizer
        confidence = cell(optimizer.tracker.free_confidence(seq), 1)
        situation = (view.num_decoding, confidence, bool(view.padded_sizes))
        cached = self._plans.get(seq.id)
        if cached is not None and cached.is_valid(situation, optimizer.settings.max_length(seq)):
            cached.polls -= 1
            return cached.plan
        options, tuning = optimizer.timed_options(view, seq), optimizer.tuning
        plan = best_plan(view, options, optimizer.settings.margin, tuning)
        polls = tuning.plan_reuse - 1 if self._are_all_familiar(seq) else 0
        self._plans[seq.id] = _CachedPlan(plan, situation, polls)
        return plan

    def _are_all_familiar(self, seq: Sequence) -> bool:
        acceptance, request = self.optimizer.acceptance, self.optimizer.tracker.request(seq)
        return all(acceptance.trials(request, each) >= self.familiar for each in self.optimizer.timed_drafters(seq))

    def forget(self, seq_id: int) -> None:
        """Drop a finished sequence."""
        self._plans.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._plans)
