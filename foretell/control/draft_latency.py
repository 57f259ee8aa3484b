"""What drafters cost that do not guess for nothing: a price for depth, for nodes, and for what they must read first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foretell.types import DrafterTraits, Sequence, StepResult

from .latency_model import DraftCosts
from .length_optimizer import DraftPlan, StepCostView

READ_AHEAD = 64  # tokens over which it must pay that a drafter has to read the text first
READ_ON_TRIAL = 16  # the same for a drafter that has hardly been tried
ALONE, SIDE_BY_SIDE = 0.2, 0.05  # of what a draft of one node costs, the part that grows with nodes: heads run levels
TREES = ", trees"  # behind a drafter's name: what its trees cost, which may be made quite otherwise than its chains


class Drafting:
    """Prices of each drafter, and how far it has read each text."""

    def __init__(self, arms: Mapping[str, DrafterTraits]) -> None:
        self.arms = dict(arms)
        self.costs = {
            name: DraftCosts(t.relative_cost, SIDE_BY_SIDE if t.makes_trees else ALONE) for name, t in arms.items()
        }
        grow = [name for name, traits in arms.items() if traits.makes_trees and not traits.is_free]
        self.costs |= {
            name + TREES: DraftCosts(arms[name].relative_cost, SIDE_BY_SIDE, self.costs[name]) for name in grow
        }
        self.free = frozenset(name for name, traits in arms.items() if traits.is_free)
        self._read: dict[int, dict[str, int]] = {}  # by sequence: the tokens each drafter has read of it

    def is_paid(self, arm: str) -> bool:
        return arm in self.arms and arm not in self.free

    def behind(self, seq: Sequence, arm: str) -> int:
        """Tokens a drafter must read before it can guess."""
        return len(seq.tokens) - self._read.get(seq.id, {}).get(arm, 0) if self.arms[arm].needs_prefill else 0

    def of(self, arm: str, tree: bool) -> DraftCosts:
        """What a drafter's trees cost, or its chains."""
        return self.costs.get(arm + TREES, self.costs[arm]) if tree else self.costs[arm]

    def for_one(
        self, market: StepCostView, seq: Sequence, arm: str, on_trial: bool, tree: bool = False
    ) -> Callable[[int, int], float]:
        """Seconds a sequence pays for so many nodes and levels, if its neighbours do alike."""
        start, level, node, token = self.of(arm, tree).prices(market.plain)
        # What must be read first is spread over the tokens it will serve; a draft for all is paid by all.
        ahead = max(1, min(seq.remaining_tokens, READ_ON_TRIAL if on_trial else READ_AHEAD))
        reading = token * self.behind(seq, arm) / ahead
        reading, level = reading + (start - market.hidden) / market.writers, level / market.writers
        return lambda nodes, depth: reading + level * depth + node * nodes

    def for_all(self, market: StepCostView, plans: list[DraftPlan]) -> float:
        """Seconds of all drafts that are planned; what must be read was weighed already."""
        total = 0.0
        for arm, tree in {(plan.arm, plan.levels > 0) for plan in plans if plan.nodes and plan.arm not in self.free}:
            mine = [plan for plan in plans if plan.arm == arm and (plan.levels > 0) == tree]
            deepest, nodes = max(plan.depth for plan in mine), sum(plan.nodes for plan in mine)
            total += self.of(arm, tree).seconds(deepest, nodes, 0, market.plain)
        return total - market.hidden if total else 0.0

    def for_trial(self, market: StepCostView, seq: Sequence, arm: str, nodes: int) -> float:
        """Seconds to try a drafter once, what it must read included."""
        return self.costs[arm].seconds(nodes, nodes, self.behind(seq, arm), market.plain)

    def node(self, market: StepCostView, arm: str) -> float:
        """What a sequence pays for one node, if all draft."""
        if arm in self.free:
            return 0.0
        return self.costs[arm].seconds(1, market.writers, 0, market.plain) / market.writers

    def floor(self, market: StepCostView, seq: Sequence, arm: str, tree: bool = False, filling: bool = False) -> float:
        """How likely a branch must be for one more node to pay; a drafter that doubts its own guess stops there.

        A node of a tree pays for its row and its place in a level; that there is a level others have paid for. One that
        only fills a step up pays for what its row looks at. Of a chain that is made whole all is paid for but the rows.
        """
        if arm in self.free:
            return 0.0
        row = market.further if filling else market.extra(market.writers) / market.writers
        prices = self.of(arm, tree).prices(market.plain)
        made = 0.0 if self._is_whole(arm, seq) else prices.node + prices.level / market.writers
        own = prices.node if tree else made
        return min(0.9, 0.7 * (own + row) * market.writers / market.plain)

    def observe(self, outcomes: list[StepResult], seconds: float | None, plain: float) -> None:
        """What a step's drafts took; None: longer than they will take again. Where two drafters shared it, or trees and
        chains, nobody can say whose time it was."""
        mine = [
            each for each in outcomes if each.scheduled.budget.nodes and self.is_paid(each.scheduled.budget.drafter)
        ]
        nodes = sum([len(outcome.draft) for outcome in mine])
        if not nodes:
            return
        shapes = {(outcome.scheduled.budget.drafter, outcome.scheduled.budget.is_tree) for outcome in mine}
        if len(shapes) != 1:
            return
        ((arm, tree),) = shapes
        behind = sum([self._read_now(outcome, arm) for outcome in mine]) if self.arms[arm].needs_prefill else 0
        depth = max([self._levels(outcome, arm) for outcome in mine])
        if seconds is not None:
            self.of(arm, tree).observe(depth, nodes, behind, seconds, plain)

    def _levels(self, outcome: StepResult, arm: str) -> int:
        """Levels that were made, if only to be left out."""
        share = outcome.scheduled
        return share.budget.depth if self._is_whole(arm, share.seq) else max(outcome.draft.depths(), default=0)

    def _is_whole(self, arm: str, seq: Sequence) -> bool:
        """Whether a drafter makes all levels of a draft for this text before it looks at any."""
        traits = self.arms[arm]
        drawn = seq.request.params.temperature > 0 and seq.request.rule != "match"
        return traits.single_graph and (traits.samples_single_graph or not drawn)

    def _read_now(self, outcome: StepResult, arm: str) -> int:
        """Tokens the drafter had to read for this step; from now on it knows them."""
        read = self._read.setdefault(outcome.scheduled.seq.id, {})
        before, read[arm] = read.get(arm, 0), outcome.scheduled.length
        return outcome.scheduled.length - before

    def lose(self, arm: str) -> None:
        """A drafter has left, and with it all it had read."""
        for read in self._read.values():
            read.pop(arm, None)

    def forget(self, seq_id: int) -> None:
        self._read.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._read)
