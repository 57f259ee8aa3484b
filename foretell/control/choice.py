"""The choice: which drafter drafts for each sequence, and how many tokens or which tree. `choose` is the one function.

It is pure: latency model, acceptance and batch in, drafter and shape out. Plain Python lists: numpy is slower on arrays
this short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from .acceptance_model import WIDTHS
from .latency_model import DraftPrices
from .settings import ControllerTuning

FREE = DraftPrices()


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
    _shares: list[float] = field(init=False, repr=False)  # cached result of `shares`

    def __post_init__(self) -> None:
        self.plain_seconds = self.curve[self.rows] + self.context_seconds
        self.plain_share = self.plain_seconds / max(1, self.num_decoding)
        self._shares = []

    def padded_nodes(self, nodes: int) -> int:
        """Return the nodes of a tree that fills the padded step of a single sequence, at least `nodes`."""
        return next((size - self.rows for size in self.padded_sizes if self.rows + nodes <= size), nodes)

    def extra_seconds(self, rows: int) -> float:
        """Return the seconds that further rows add to the step."""
        at = min(self.rows + rows, len(self.curve) - 1)
        return self.curve[at] - self.curve[self.rows] + rows * self.row_context_seconds

    def shares(self, most: int) -> list[float]:
        """Return a sequence's share of the step by its draft tokens, at least up to `most`, if all have as many."""
        found, count = self._shares, self.num_decoding
        for nodes in range(len(found), most + 1):
            shared = self.extra_seconds(nodes * count) + self.host_gap
            found.append(self.plain_share + shared / count)
        return found

    def sequence_seconds(self, nodes: int, prices: DraftPrices | None = None, depth: int = 0) -> float:
        """Return a sequence's share of the step if all draft `nodes` tokens; start and levels are shared."""
        found = self.shares(nodes)[nodes]
        if prices is None:
            return found
        return found + (prices.start - self.hidden_gap + prices.level * depth) / self.num_decoding + prices.node * nodes

    def break_even(self, prices: DraftPrices | None = None) -> float:
        """Return the break-even acceptance of one draft token: the cost ratio of the step minus 1. It can exceed 1."""
        return self.sequence_seconds(1, prices, 1) / self.plain_share - 1


@dataclass(slots=True)
class DrafterOption:
    """Drafts that one drafter could make for a sequence."""

    drafter: str
    accept_probs: list[float]  # of each node of a chain, or of the draft that a free drafter offers
    prices: DraftPrices | None = None  # None if drafting is free
    prefill_seconds: float = 0.0  # share of this step in the drafter's prefill
    max_nodes: int = 0  # of a tree; 0 if the drafter makes chains only
    tree_prices: DraftPrices | None = None
    level_probs: Callable[[float], list[float]] | None = None  # of a tree by width: each level has an accepted node


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
        if not nodes:
            return PLAIN
        levels = self.levels if nodes > self.levels else 0
        seconds = view.sequence_seconds(nodes, self.prices, levels or nodes)
        speedup = (1 + sum(self.accept_probs[:nodes])) * view.plain_share / seconds
        return replace(self, nodes=nodes, speedup=max(1.0, min(self.speedup, speedup)), levels=levels)


PLAIN = Choice()


def choose(
    view: StepCostView,
    options: Sequence[Sequence[DrafterOption]],
    margin: float,
    throughput: bool = False,
    is_late: Sequence[bool] = (),
    tuning: ControllerTuning = ControllerTuning(),
) -> list[Choice]:
    """Return the drafter and shape for each sequence that maximise expected tokens per second of the step.

    With `throughput` the tokens of the batch count; otherwise each sequence's time per token, so that none starves.
    Sequences that are late on their SLO choose what is fastest for them alone, and weigh more when rows are given out.
    Plain decoding wins unless a draft promises more than `margin`.

    What may still shorten the result, all of it in `AdaptiveController._budgets` and `Scheduler.schedule`:
    the least draft length, unloaded drafters, free KV pages and the token limit of a step, the tokens that a grammar
    forces or forbids, and `max_tokens` (already a limit of the options).
    """
    late = is_late if 0 < sum(is_late) < view.num_decoding else [False] * len(options)
    alone = replace(view, num_decoding=1) if any(late) else view
    known: dict[tuple[int, bool], Choice] = {}  # sequences that share their options share the choice
    for mine, urgent in zip(options, late, strict=True):
        if (id(mine), urgent) not in known:
            known[id(mine), urgent] = best_choice(alone if urgent else view, mine, margin, tuning)
    best = [known[id(mine), urgent] for mine, urgent in zip(options, late, strict=True)]
    if len(best) == view.num_decoding == 1:
        return best
    weights = [tuning.slo_weight * view.num_decoding / sum(late) if urgent else 1.0 for urgent in late]
    tried = [best, *fewer_drafters(view, options, best, margin, tuning)]
    allocated = [allocate(view, choices, throughput, margin, weights) for choices in tried]
    at = max(range(len(tried)), key=lambda index: allocated[index][1])
    return [each.resized(view, nodes) for each, nodes in zip(tried[at], allocated[at][0], strict=True)]


def fewer_drafters(
    view: StepCostView,
    options: Sequence[Sequence[DrafterOption]],
    best: list[Choice],
    margin: float,
    tuning: ControllerTuning,
) -> Iterator[list[Choice]]:
    """Yield the choices with one timed drafter or none: start and levels are shared, so it may be faster."""
    timed = {choice.drafter for choice in best if choice.prices is not None}
    if len({choice.drafter for choice in best}) == 1:
        return
    for kept in sorted({"", *timed}) if len(timed) > 1 else [""] * len(timed):
        fewer = list(best)
        for index, choice in enumerate(best):
            if choice.prices is not None and choice.drafter != kept:
                left = [each for each in options[index] if each.prices is None or each.drafter == kept]
                fewer[index] = best_choice(view, left, margin, tuning)
        yield fewer


def best_choice(
    view: StepCostView, options: Sequence[DrafterOption], margin: float, tuning: ControllerTuning = ControllerTuning()
) -> Choice:
    """Return the fastest drafter and shape for one sequence if all others draft alike, or PLAIN within `margin`."""
    best, length, chosen = 1 + margin, 0, None
    share, cutoff, count = view.plain_share, tuning.chain_cutoff, view.num_decoding
    for option in options:
        start, level, node, _ = option.prices or FREE
        per_node, fixed = level / count + node, option.prefill_seconds
        if option.prices is not None:
            fixed += (start - view.hidden_gap) / count
        shares = view.shares(len(option.accept_probs))
        expected, best_here = 1.0, 0.0
        for nodes, probability in enumerate(option.accept_probs, 1):
            expected += probability
            speedup = expected * share / (shares[nodes] + fixed + per_node * nodes)
            if speedup > best_here:
                best_here = speedup
                if speedup > best:
                    best, length, chosen = speedup, nodes, option
            elif speedup < cutoff * best_here:
                break  # later tokens cost as much and are accepted less often; only the start can be expensive
    for option in options:
        if option.max_nodes and (tree := _best_tree(view, option, best, cutoff)) is not None:
            return tree
    if chosen is None:
        return PLAIN
    # A node is worth no more than those before it, because drafts are always cut at their end.
    probs = accumulate(chosen.accept_probs[: length if count == 1 else 2 * length + 1], min)
    return Choice(chosen.drafter, length, best, tuple(probs), 0, chosen.prices)


def _best_tree(view: StepCostView, option: DrafterOption, best: float, cutoff: float) -> Choice | None:
    """Return the fastest tree of a drafter, or None if none is faster than `best`."""
    found: tuple[int, int, float] | None = None
    for width in WIDTHS:
        best_here = 0.0
        for depth in range(1, option.max_nodes // width + 1):
            nodes = min(option.max_nodes, view.padded_nodes(width * depth))
            probs = option.level_probs(nodes / depth) if option.level_probs else []
            if depth > len(probs):
                break
            expected = 1 + sum(probs[:depth])
            seconds = view.sequence_seconds(nodes, option.tree_prices, depth) + option.prefill_seconds
            speedup = expected * view.plain_share / seconds
            best_here = max(best_here, speedup)
            if speedup > best:
                best, found = speedup, (nodes, depth, expected)
            if speedup < cutoff * best_here:
                break
        if best_here < cutoff * best:
            break  # rows are too expensive for wider trees
    if found is None:
        return None
    nodes, depth, expected = found
    # A tree that `allocate` cuts to its depth becomes a chain. The further nodes share what the tree adds to that.
    chain = option.accept_probs[:depth]
    more = max(0.0, expected - 1 - sum(chain)) / max(1, nodes - depth)
    falling = accumulate([*chain, *[more] * (nodes - len(chain))], min)
    return Choice(option.drafter, nodes, best, tuple(falling), depth, option.tree_prices)


def allocate(
    view: StepCostView, choices: Sequence[Choice], throughput: bool, margin: float, weights: Sequence[float] = ()
) -> tuple[list[int], float]:
    """Return the nodes of each sequence that make the batch fastest, and its speed.

    Nodes are taken greedily by their value. The step pays for the rows, the levels and the nodes that were taken.
    """
    weights = weights or [1.0] * len(choices)
    total = view.num_decoding + sum(weights) - len(choices)  # sequences that may not draft have weight 1
    best, best_rows, gained = (total if throughput else 1.0) / view.plain_seconds * (1 + margin), 0, 0.0
    taken, depths = [0] * len(choices), dict[DraftPrices, int]()  # nodes by sequence, levels by kind of draft
    order = sorted(_node_values(choices, throughput, weights), reverse=True)
    curve, at, last = view.curve, view.rows, len(view.curve) - 1
    seconds, row_seconds = view.context_seconds + view.host_gap, view.row_context_seconds
    for rows, (value, index) in enumerate(order, 1):
        gained += value
        choice = choices[index]
        prices = choice.prices
        if prices is not None:
            taken[index] = depth = taken[index] + 1
            before = depths.get(prices)
            if before is None:
                seconds += prices.start - (0.0 if depths else view.hidden_gap)
                depths[prices] = before = 0
            if before < depth and not before >= choice.levels > 0:
                depths[prices] = depth
                seconds += prices.level
            seconds += prices.node
        seconds += row_seconds
        at += at < last
        tokens = total + gained if throughput else 1 / (1 - gained / total)
        speed = tokens / (seconds + curve[at])
        if speed > best:
            best, best_rows = speed, rows
    nodes = [0] * len(choices)
    for _, index in order[:best_rows]:
        nodes[index] += 1
    return nodes, best


def _node_values(choices: Sequence[Choice], throughput: bool, weights: Sequence[float]) -> list[tuple[float, int]]:
    """Return the value of each node and the index of its sequence. Values never increase along a draft."""
    items = []
    for index, (choice, weight) in enumerate(zip(choices, weights, strict=True)):
        expected, least = 1.0, float("inf")
        for probability in choice.accept_probs:
            value = weight * (probability if throughput else 1 / expected - 1 / (expected + probability))
            least = value if value < least else least
            items.append((least, index))
            expected += probability
    return items


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
