"""The choice: which drafter drafts for each sequence, and how many tokens or which tree. `choose` is the one function.

It is pure: latency model, acceptance and batch in, drafter and shape out. Plain Python lists: numpy is slower on arrays
this short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from .acceptance_model import WIDTHS
from .draft_latency import DraftPrices
from .settings import ControllerTuning


@dataclass(slots=True)
class StepCostView:
    """Costs of the step to be planned, as functions of the number of draft tokens."""

    num_decoding: int  # sequences in decode
    rows: int  # rows of the step without drafts
    curve: Sequence[float]  # seconds by rows
    context_seconds: float = 0.0  # seconds of attention over all cached tokens
    row_context_seconds: float = 0.0  # seconds of attention of one further row
    host_gap: float = 0.0  # seconds added by any draft: a step with drafts cannot be sent before its tokens are known
    hidden_gap: float = 0.0  # part of the gap that a timed drafter hides, because the step is sent while it drafts
    padded_sizes: tuple[int, ...] = ()  # row counts to which the step of a single sequence is padded
    plain_seconds: float = field(init=False)  # seconds of the step without drafts
    plain_share: float = field(init=False)  # that divided by the decoding sequences

    def __post_init__(self) -> None:
        self.plain_seconds = self.curve[self.rows] + self.context_seconds
        self.plain_share = self.plain_seconds / max(1, self.num_decoding)

    def padded_nodes(self, nodes: int) -> int:
        """Return the nodes of a tree that fills the padded step of a single sequence, at least `nodes`."""
        return next((size - self.rows for size in self.padded_sizes if self.rows + nodes <= size), nodes)

    def free_rows(self, margin: float) -> int:
        """Return the further rows that lengthen the step by at most this share."""
        limit, rows = margin * self.plain_seconds, 0
        while self.rows + rows + 1 < len(self.curve) and self.extra_seconds(rows + 1) <= limit:
            rows += 1
        return rows

    def extra_seconds(self, rows: int) -> float:
        """Return the seconds that further rows add to the step."""
        at = min(self.rows + rows, len(self.curve) - 1)
        return self.curve[at] - self.curve[self.rows] + rows * self.row_context_seconds

    def sequence_seconds(self, nodes: int, prices: DraftPrices | None = None, depth: int = 0) -> float:
        """Return a sequence's share of the step if all draft `nodes` tokens; start and levels are shared."""
        count, at = self.num_decoding, self.rows + nodes * self.num_decoding
        curve, last = self.curve, len(self.curve) - 1
        shared = curve[at if at < last else last] - curve[self.rows] + self.host_gap
        found = self.plain_share + nodes * self.row_context_seconds
        if prices is not None:
            shared += prices[0] - self.hidden_gap + prices[1] * depth
            found += prices[2] * nodes
        return found + shared / count

    def break_even(self, prices: DraftPrices | None = None) -> float:
        """Return the break-even acceptance of one draft token: the cost ratio of the step minus 1. It can exceed 1."""
        return self.sequence_seconds(1, prices, 1) / self.plain_share - 1


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """Drafts that one drafter could make for a sequence."""

    drafter: str
    accept_probs: list[float]  # of each node of a chain, or of the draft that a free drafter offers
    prices: DraftPrices | None = None  # None if drafting is free
    prefill_seconds: float = 0.0  # share of this step in the drafter's prefill
    max_nodes: int = 0  # of a tree; 0 if the drafter makes chains only
    tree_prices: DraftPrices | None = None
    level_probs: Callable[[float], list[float]] = (
        lambda width: []
    )  # of a tree by width: each level has an accepted node


@dataclass(frozen=True, slots=True)
class Choice:
    """The draft chosen for one sequence and its expected speedup; 0 nodes is plain decoding."""

    drafter: str = ""
    nodes: int = 0
    speedup: float = 1.0
    accept_probs: tuple[float, ...] = ()  # never increasing; some more than `nodes`, if others draft less
    levels: int = 0  # depth of a tree; 0 for a chain and for a free draft
    prices: DraftPrices | None = None

    @property
    def depth(self) -> int:
        return self.levels or self.nodes

    def resized(self, view: StepCostView, nodes: int) -> Choice:
        """Return the choice with another number of nodes."""
        if nodes == self.nodes:
            return self
        expected, levels = 1 + sum(self.accept_probs[:nodes]), self.levels if nodes > self.levels else 0
        seconds = view.sequence_seconds(nodes, self.prices, levels or nodes)
        speedup = max(1.0, min(self.speedup, expected * view.plain_share / seconds))
        return replace(self, nodes=nodes, levels=levels, speedup=speedup) if nodes else PLAIN


PLAIN = Choice()


def choose(
    view: StepCostView,
    options: Sequence[Sequence[DrafterOption]],
    margin: float,
    throughput: bool = False,
    has_priority: Sequence[bool] = (),
    tuning: ControllerTuning = ControllerTuning(),
) -> list[Choice]:
    """Return the drafter and shape for each sequence that maximise expected tokens per second of the step.

    With `throughput` the tokens of the batch count; otherwise each sequence's time per token, so that none starves. A
    sequence with priority (late on its SLO) gets what is fastest for it alone, within a bound on the growth of the
    step, and the others draft only in rows that cost almost nothing. Plain decoding wins unless a draft promises more
    than `margin`.

    What may still shorten the result, all of it in `AdaptiveController._budgets` and `Scheduler.schedule`:
    the least draft length, unloaded drafters, free KV pages and the token limit of a step, the tokens that a grammar
    forces or forbids, and `max_tokens` (already a limit of the options).
    """
    urgent = has_priority if any(has_priority) else ()
    if urgent:
        alone = replace(view, num_decoding=1)
        best = [
            best_choice(
                alone if first else view, [each for each in mine if first or each.prices is None], margin, tuning
            )
            for mine, first in zip(options, urgent, strict=True)
        ]
        nodes = _allocate_with_priority(view, best, urgent, throughput, margin, tuning)
    else:
        best = [best_choice(view, mine, margin, tuning) for mine in options]
        if view.num_decoding == 1 and len(best) == 1:
            return best
        nodes, speed = allocate(view, best, throughput, margin)
        drafters = {choice.drafter for choice in best if choice.prices is not None}
        for kept in (*drafters, "") if len(drafters) > 1 else ("",) if drafters else ():
            # Levels are shared, so fewer drafters may be faster than each sequence's best: one of them, or free ones.
            fewer = [[each for each in mine if each.prices is None or each.drafter == kept] for mine in options]
            others = [best_choice(view, mine, margin, tuning) for mine in fewer]
            found, reached = allocate(view, others, throughput, margin)
            if reached > speed:
                best, nodes, speed = others, found, reached
    return [choice.resized(view, count) for choice, count in zip(best, nodes, strict=True)]


def best_choice(
    view: StepCostView, options: Sequence[DrafterOption], margin: float, tuning: ControllerTuning = ControllerTuning()
) -> Choice:
    """Return the fastest drafter and shape for one sequence if all others draft alike, or PLAIN within `margin`."""
    best, length, chosen = 1 + margin, 0, None
    share, cutoff, seconds_of = view.plain_share, tuning.chain_cutoff, view.sequence_seconds
    for option in options:
        expected, best_here, prices, prefill = 1.0, 0.0, option.prices, option.prefill_seconds
        for nodes, probability in enumerate(option.accept_probs, 1):
            expected += probability
            speedup = expected * share / (seconds_of(nodes, prices, nodes) + prefill)
            if speedup > best:
                best, length, chosen = speedup, nodes, option
            if speedup > best_here:
                best_here = speedup
            elif speedup < cutoff * best_here:
                break  # later tokens cost as much and are accepted less often; only the start can be expensive
    tree = _best_tree(view, options, best, tuning)
    if tree is not None:
        return tree
    if chosen is None:
        return PLAIN
    # A node is worth no more than those before it, because drafts are always cut at their end.
    spare = length if view.num_decoding == 1 else 2 * length + 1
    return Choice(chosen.drafter, length, best, tuple(accumulate(chosen.accept_probs[:spare], min)), 0, chosen.prices)


def _best_tree(
    view: StepCostView, options: Sequence[DrafterOption], best: float, tuning: ControllerTuning
) -> Choice | None:
    """Return the fastest tree, or None if none is faster than `best`."""
    found: tuple[DrafterOption, int, int, float] | None = None
    for option in options:
        for width in WIDTHS if option.max_nodes else ():
            best_here = 0.0
            for nodes, depth, expected in _tree_sizes(view, option, width):
                seconds = view.sequence_seconds(nodes, option.tree_prices, depth) + option.prefill_seconds
                speedup = expected * view.plain_share / seconds
                best_here = max(best_here, speedup)
                if speedup > best:
                    best, found = speedup, (option, depth, nodes, expected)
                if speedup < tuning.chain_cutoff * best_here:
                    break
            if best_here < tuning.chain_cutoff * best:
                break  # rows are too expensive for wider trees
    if found is None:
        return None
    option, depth, nodes, expected = found
    # A tree that `allocate` cuts to its depth becomes a chain. The further nodes share what the tree adds to that.
    chain = option.accept_probs[:depth]
    more = max(0.0, expected - 1 - sum(chain)) / max(1, nodes - depth)
    probs = tuple(accumulate([*chain, *[more] * (nodes - len(chain))], min))
    return Choice(option.drafter, nodes, best, probs, depth, option.tree_prices)


def _tree_sizes(view: StepCostView, option: DrafterOption, width: int) -> Iterator[tuple[int, int, float]]:
    """Yield nodes, depth and expected tokens of trees of a width, widened by nodes that only fill a padded step."""
    for depth in range(1, option.max_nodes // width + 1):
        nodes = min(option.max_nodes, view.padded_nodes(width * depth))
        probs = option.level_probs(nodes / depth)
        if depth > len(probs):
            return
        yield nodes, depth, 1 + sum(probs[:depth])


def allocate(
    view: StepCostView, choices: Sequence[Choice], throughput: bool, margin: float, max_nodes: int | None = None
) -> tuple[list[int], float]:
    """Return the nodes of each sequence, at most `max_nodes` in all, that make the batch fastest, and its speed.

    Nodes are taken greedily by their value. The step pays for the rows, the levels and the nodes that were taken.
    """
    count, taken, best_rows = view.num_decoding, [0] * len(choices), 0
    best, gained = (count if throughput else 1.0) / view.plain_seconds * (1 + margin), 0.0
    groups: dict[DraftPrices, int] = {}  # depth of each kind of draft
    fixed, drafting = view.plain_seconds + view.host_gap, 0.0
    order = sorted(_node_values(choices, throughput), reverse=True)[:max_nodes]
    for rows, (value, index) in enumerate(order, 1):
        gained += value
        choice, prices = choices[index], choices[index].prices
        if prices is not None:
            taken[index] = depth = taken[index] + 1
            before = groups.get(prices)
            if before is None:
                groups[prices] = before = 0
                drafting += prices.start - (0.0 if drafting else view.hidden_gap)
            if before < depth and not before >= choice.levels > 0:
                groups[prices] = depth
                drafting += prices.level
            drafting += prices.node
        tokens = count + gained if throughput else 1 / (1 - gained / count)
        speed = tokens / (fixed + view.extra_seconds(rows) + drafting)
        if speed > best:
            best, best_rows = speed, rows
    nodes = [0] * len(choices)
    for _, index in order[:best_rows]:
        nodes[index] += 1
    return nodes, best


def _node_values(choices: Sequence[Choice], throughput: bool) -> list[tuple[float, int]]:
    """Return the value of each node and the index of its sequence. Values never increase along a draft."""
    items = []
    for index, choice in enumerate(choices):
        expected, least = 1.0, float("inf")
        for probability in choice.accept_probs:
            value = probability if throughput else 1 / expected - 1 / (expected + probability)
            least = min(least, value)
            items.append((least, index))
            expected += probability
    return items


def _allocate_with_priority(
    view: StepCostView, choices: list[Choice], urgent: Sequence[bool], throughput: bool, margin: float,
    tuning: ControllerTuning,
) -> list[int]:  # fmt: skip
    """Return the nodes of each sequence if some are late on their SLO."""
    limit = view.free_rows(tuning.slo_step_growth)
    nodes = [choice.nodes if first else 0 for choice, first in zip(choices, urgent, strict=True)]
    if sum(nodes) > limit:  # keep the nodes that are most likely accepted
        values = _node_values([choice if first else PLAIN for choice, first in zip(choices, urgent, strict=True)], True)
        kept = [index for _, index in sorted(values, reverse=True)[:limit]]
        nodes = [kept.count(index) for index in range(len(choices))]
    rest = replace(view, rows=min(view.rows + sum(nodes), len(view.curve) - 1), host_gap=0.0)
    others = [PLAIN if first else choice for choice, first in zip(choices, urgent, strict=True)]
    further, _ = allocate(rest, others, throughput, 0.0, rest.free_rows(margin))
    return [mine + other for mine, other in zip(nodes, further, strict=True)]


def min_probability(
    view: StepCostView, choice: Choice, is_single_graph: bool, tuning: ControllerTuning = ControllerTuning()
) -> float:
    """Return the probability below which one more token on a branch does not pay, so that the drafter stops there.

    A token of a tree pays for its row and for itself; its level is there anyway. A token that only fills a padded step
    pays for its attention over the context alone. A chain that is drafted in a single graph is paid for to its end.
    """
    if choice.prices is None:
        return 0.0
    count, level, node = view.num_decoding, choice.prices.level, choice.prices.node
    pads = bool(choice.levels and view.padded_sizes)
    row = view.row_context_seconds if pads else view.extra_seconds(count) / count
    if not choice.levels:
        node = 0.0 if is_single_graph else node + level / count
    return min(0.9, tuning.min_probability_factor * (node + row) / view.plain_share)
