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

    def shares(self, most: int) -> list[float]:
        """Return a sequence's share of the step by its draft tokens, at least up to `most`, if all have as many."""
        found = self._shares
        if len(found) <= most:
            count, gap, last = self.num_decoding, self.host_gap - self.curve[self.rows], len(self.curve) - 1
            for nodes in range(len(found), most + 1):
                shared = self.curve[min(self.rows + nodes * count, last)] + gap
                found.append(self.plain_share + nodes * self.row_context_seconds + shared / count)
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

    def trees(self, view: StepCostView, width: int) -> Iterator[tuple[int, int, float]]:
        """Yield nodes, depth and expected tokens of trees of a width, widened by nodes that only fill a padded step."""
        for depth in range(1, self.max_nodes // width + 1):
            nodes = min(self.max_nodes, view.padded_nodes(width * depth))
            probs = self.level_probs(nodes / depth) if self.level_probs else []
            if depth > len(probs):
                return
            yield nodes, depth, 1 + sum(probs[:depth])


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
        expected, seconds = (
            1 + sum(self.accept_probs[:nodes]),
            view.sequence_seconds(nodes, self.prices, levels or nodes),
        )
        speedup = max(1.0, min(self.speedup, expected * view.plain_share / seconds))
        return Choice(self.drafter, nodes, speedup, self.accept_probs, levels, self.prices)


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
    if any(has_priority):
        return _choose_with_priority(view, options, margin, throughput, has_priority, tuning)
    best = [best_choice(view, mine, margin, tuning) for mine in options]
    if view.num_decoding == 1 and len(best) == 1:
        return best
    chosen, (nodes, speed) = best, allocate(view, best, throughput, margin)
    timed = [choice.drafter for choice in best if choice.prices is not None]
    # Levels are shared, so fewer drafters may be faster than each sequence's best: one of them, or only free ones. If
    # all sequences draft alike, the best choice of each is exact.
    kept = {*timed, ""} if len({*timed}) > 1 else {""} if 0 < len(timed) < len(best) else ()
    for drafter in sorted(kept):
        others = [
            choice
            if choice.prices is None or choice.drafter == drafter
            else best_choice(
                view, [each for each in mine if each.prices is None or each.drafter == drafter], margin, tuning
            )
            for choice, mine in zip(best, options, strict=True)
        ]
        found, reached = allocate(view, others, throughput, margin)
        if reached > speed:
            chosen, nodes, speed = others, found, reached
    return [choice.resized(view, count) for choice, count in zip(chosen, nodes, strict=True)]


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
        if option.max_nodes:
            tree = _best_tree(view, option, best, cutoff)
            if tree is not None:
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
        for nodes, depth, expected in option.trees(view, width):
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
    probs = tuple(accumulate([*chain, *[more] * (nodes - len(chain))], min))
    return Choice(option.drafter, nodes, best, probs, depth, option.tree_prices)


def allocate(
    view: StepCostView, choices: Sequence[Choice], throughput: bool, margin: float, max_nodes: int | None = None
) -> tuple[list[int], float]:
    """Return the nodes of each sequence, at most `max_nodes` in all, that make the batch fastest, and its speed.

    Nodes are taken greedily by their value. The step pays for the rows, the levels and the nodes that were taken.
    """
    count, taken, best_rows = view.num_decoding, [0] * len(choices), 0
    best, gained = (count if throughput else 1.0) / view.plain_seconds * (1 + margin), 0.0
    depths: dict[DraftPrices, int] = {}  # of each kind of draft
    order = sorted(_node_values(choices, throughput), reverse=True)[:max_nodes]
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
        tokens = count + gained if throughput else 1 / (1 - gained / count)
        speed = tokens / (seconds + curve[at])
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
        if throughput:
            items += [(probability, index) for probability in choice.accept_probs]
            continue
        expected, least = 1.0, float("inf")
        for probability in choice.accept_probs:
            value = 1 / expected - 1 / (expected + probability)
            least = value if value < least else least
            items.append((least, index))
            expected += probability
    return items


def _choose_with_priority(
    view: StepCostView,
    options: Sequence[Sequence[DrafterOption]],
    margin: float,
    throughput: bool,
    urgent: Sequence[bool],
    tuning: ControllerTuning,
) -> list[Choice]:
    """Return the choice of each sequence if some are late on their SLO."""
    alone, limit = replace(view, num_decoding=1), view.free_rows(tuning.slo_step_growth)
    first, rest = [], []
    for mine, late in zip(options, urgent, strict=True):
        first.append(best_choice(alone, mine, margin, tuning) if late else PLAIN)
        free = [] if late else [each for each in mine if each.prices is None]
        rest.append(best_choice(view, free, margin, tuning))
    nodes = [choice.nodes for choice in first]
    if sum(nodes) > limit:  # keep the nodes that are most likely accepted
        kept = [index for _, index in sorted(_node_values(first, True), reverse=True)[:limit]]
        nodes = [kept.count(index) for index in range(len(first))]
    others = replace(view, rows=min(view.rows + sum(nodes), len(view.curve) - 1), host_gap=0.0)
    further, _ = allocate(others, rest, throughput, 0.0, others.free_rows(margin))
    best = [choice if late else other for choice, other, late in zip(first, rest, urgent, strict=True)]
    return [choice.resized(view, mine + more) for choice, mine, more in zip(best, nodes, further, strict=True)]


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
