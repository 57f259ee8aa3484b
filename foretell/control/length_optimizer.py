"""Where rows are spent: the arithmetic of a step, as functions of numbers alone. No arrays: they are too short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace
from itertools import accumulate

HOPELESS = 0.97  # of the best that was found: what is so much slower is not better farther on
DEAR = 0.9  # of the best: where a tree has so little, rows are too dear for wider ones
LONGER = 0.5  # of a step may those in a hurry add to it, and to everybody's time


Seconds = Callable[[int, int], float]  # of nodes in so many levels


@dataclass(frozen=True)
class TreeOptions:
    """Trees of up to so many nodes, of several widths in nodes a level, the narrowest first: how likely each level of
    one is to stand, by its width, and what drafting costs."""

    widths: tuple[int, ...]
    most: int
    levels: Callable[[float], list[float]]
    draft_seconds: Seconds | None = None


@dataclass(frozen=True)
class DrafterOption:
    """What one drafter could guess for a sequence: for each node how likely it is to stand, and what drafting costs."""

    arm: str
    survival: list[float]
    draft_seconds: Seconds | None = None  # None where they cost nothing
    bushes: TreeOptions | None = None  # where it makes trees


@dataclass
class StepCostView:
    """The step to be planned: `writers` sequences write, `rows` are run anyway, `curve[i]` prices a step of i rows.

    `held` is what the step costs besides its rows, such as looking at what is cached, `further` what each further row
    costs beside its place in the curve, `waiting` what the device waits for the host where anybody guesses: a step of
    guesses cannot be sent before the tokens are known that they stand behind. `hidden` is what of that a drafter does
    not wait for that takes time: the step is sent while it guesses.
    """

    writers: int
    rows: int
    curve: Values[float]
    held: float = 0.0
    further: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0
    sizes: tuple[int, ...] = ()  # rows that the step of a text alone is filled up to
    plain: float = field(init=False)  # seconds of the step without drafts
    share: float = field(init=False)  # of that, what each sequence pays
    _taken: dict[int, float] = field(init=False, repr=False)  # by nodes

    def __post_init__(self) -> None:
        self.plain = float(self.curve[self.rows]) + self.held
        self.share = self.plain / max(1, self.writers)
        self._taken = {}

    def filled(self, nodes: int) -> int:
        """Nodes that a tree may have where so many are wanted: what fills the step of a text alone up costs no row."""
        return next((size - self.rows for size in self.sizes if self.rows + nodes <= size), nodes)

    def spare(self, margin: float) -> int:
        """Further rows that cost next to nothing, by this share of the step."""
        most, rows = margin * self.plain, 0
        while self.rows + rows + 1 < len(self.curve) and self.extra(rows + 1) <= most:
            rows += 1
        return rows

    def extra(self, rows: int) -> float:
        """Seconds that so many further rows cost."""
        at = min(self.rows + rows, len(self.curve) - 1)
        return float(self.curve[at]) - float(self.curve[self.rows]) + rows * self.further

    def gain(self, expected: float, nodes: int, drafting: float = 0.0) -> float:
        """How much faster than plain a sequence goes that writes so many tokens a step with `nodes` nodes, which take
        `drafting` to be made, if all draft as many."""
        return expected * self.share / (self.taken(nodes) + drafting)

    def taken(self, nodes: int) -> float:
        """What a sequence pays with so many nodes, drafting aside; many are asked for again and again."""
        taken = self._taken.get(nodes)
        if taken is None:
            at = min(self.rows + nodes * self.writers, len(self.curve) - 1)
            extra = (self.curve[at] - self.curve[self.rows]) / self.writers + nodes * self.further
            taken = self._taken[nodes] = self.share + extra + (self.waiting / self.writers if nodes else 0.0)
        return taken


@dataclass(frozen=True)
class DraftPlan:
    """Nodes for one sequence, and how much faster than plain it should go; 0 nodes is plain."""

    arm: str = ""
    nodes: int = 0
    gain: float = 1.0
    survival: tuple[float, ...] = ()
    levels: int = 0  # of a tree; 0: it is a chain, or what was offered

    @property
    def depth(self) -> int:
        return self.levels or self.nodes


PLAIN = DraftPlan()


def best_plan(market: StepCostView, candidates: list[DrafterOption], margin: float) -> DraftPlan:
    """The drafter and length that make a sequence fastest, if its neighbours do alike; plain unless it wins clearly."""
    best, length, chosen = 1 + margin, 0, None
    share, taken = market.share, market.taken
    for candidate in candidates:
        expected, drafting, here = 1.0, candidate.draft_seconds, 0.0
        for nodes, survival in enumerate(candidate.survival, 1):
            expected += survival
            gain = expected * share / (taken(nodes) + (0.0 if drafting is None else drafting(nodes, nodes)))
            if drafting is not None:
                here = max(here, gain)
                if gain < HOPELESS * here:
                    break  # each node of a chain costs as much, and stands less often; only to begin may be dear
            if gain > best:
                best, length, chosen = gain, nodes, candidate
    tree = _best_tree(market, candidates, best)
    if tree is not None:
        return tree
    if chosen is None:
        return PLAIN
    # A node counts for no more than those before it: what is cut is always the end.
    return DraftPlan(chosen.arm, length, best, tuple(accumulate(chosen.survival[:length], min)))


def _best_tree(market: StepCostView, candidates: list[DrafterOption], best: float) -> DraftPlan | None:
    """The tree that makes a sequence fastest, if any is faster than `best`. Where rows are too dear for one, none that
    is wider is looked at."""
    found: tuple[DrafterOption, int, int, float] | None = None
    for candidate in candidates:
        bushes = candidate.bushes
        for wide in () if bushes is None else bushes.widths:
            assert bushes is not None, "it has widths"
            here = 0.0
            for nodes, depth, expected in _grown(market, bushes, wide):
                seconds = 0.0 if bushes.draft_seconds is None else bushes.draft_seconds(nodes, depth)
                gain = market.gain(expected, nodes, seconds)
                here = max(here, gain)
                if gain > best:
                    best, found = gain, (candidate, depth, nodes, expected)
                if gain < HOPELESS * here:
                    break
            if here < DEAR * best:
                break
    if found is None:
        return None
    candidate, depth, nodes, expected = found
    # Cut to its depth it would be a chain; what the others add, each of them adds alike.
    chain = candidate.survival[:depth]
    more = max(0.0, expected - 1 - sum(chain)) / (nodes - depth)
    return DraftPlan(candidate.arm, nodes, best, tuple(accumulate([*chain, *[more] * (nodes - depth)], min)), depth)


def _grown(market: StepCostView, bushes: TreeOptions, wide: int) -> Iterator[tuple[int, int, float]]:
    """Trees of a width, or of as many nodes more as cost no row: nodes, levels, and the tokens a step should give."""
    levels: dict[float, list[float]] = {}
    for depth in range(1, bushes.most // wide + 1):
        nodes = min(bushes.most, market.filled(wide * depth))
        width = nodes / depth
        standing = levels.get(width)
        if standing is None:
            standing = levels[width] = bushes.levels(width)
        if depth > len(standing):
            return
        yield nodes, depth, 1 + sum(standing[:depth])


def share_out(
    market: StepCostView,
    plans: list[DraftPlan],
    drafting: float,
    throughput: bool,
    margin: float,
    most: int | None = None,
) -> list[int]:
    """Nodes for each sequence, `most` in all, such that the whole batch goes fastest; `drafting` is paid if any drafts.

    Throughput counts tokens; else every sequence's own time a token counts, so that all get their turn.
    """
    if market.writers == 1 and len(plans) == 1 and most is None:
        return [plans[0].nodes]  # what is best for it is best for all
    items, writers = sorted(_items(plans, throughput), reverse=True)[:most], market.writers
    fastest, taken, gained = (writers if throughput else 1.0) / market.plain * (1 + margin), 0, 0.0
    for count, (worth, _) in enumerate(items, 1):
        gained += worth
        tokens = writers + gained if throughput else 1 / (1 - gained / writers)
        speed = tokens / (market.plain + market.extra(count) + drafting + market.waiting)
        if speed > fastest:
            fastest, taken = speed, count
    nodes = [0] * len(plans)
    for _, sequence in items[:taken]:
        nodes[sequence] += 1
    return nodes


def given(market: StepCostView, plan: DraftPlan, nodes: int) -> float:
    """How much faster than plain a sequence should go that was given some of the nodes of its plan."""
    if nodes >= plan.nodes:
        return plan.gain
    return min(plan.gain, market.gain(1 + sum(plan.survival[:nodes]), nodes))


def _items(plans: list[DraftPlan], throughput: bool) -> list[tuple[float, int]]:
    """For each node what it is worth, and whose it is; a sequence's nodes are worth less and less."""
    items = []
    for sequence, plan in enumerate(plans):
        expected, least = 1.0, float("inf")
        for survival in plan.survival:
            worth = survival if throughput else 1 / expected - 1 / (expected + survival)
            least = min(least, worth)
            items.append((least, sequence))
            expected += survival
    return items


def let_pass(
    market: StepCostView, plans: list[DraftPlan], hurried: list[bool], throughput: bool, margin: float
) -> list[int]:
    """Those in a hurry get what they planned, as long as the step stays bearable for all; of the others guess who can
    without making it longer."""
    first = [plan if mine else PLAIN for plan, mine in zip(plans, hurried, strict=True)]
    most = market.spare(LONGER)
    nodes = [plan.nodes for plan in first]
    if sum(nodes) > most:  # the likeliest of their nodes
        nodes = [0] * len(plans)
        for _, sequence in sorted(_items(first, True), reverse=True)[:most]:
            nodes[sequence] += 1
    rest = replace(market, rows=min(market.rows + sum(nodes), len(market.curve) - 1))
    others = [PLAIN if mine else plan for plan, mine in zip(plans, hurried, strict=True)]
    given = share_out(rest, others, 0.0, throughput, 0.0, rest.spare(margin))
    return [mine + other for mine, other in zip(nodes, given, strict=True)]


def break_even(market: StepCostView, draft_seconds: float = 0.0) -> float:
    """How often a single guess must stand to pay for its row."""
    row = (market.extra(market.writers) + market.waiting) / market.writers
    return (row + draft_seconds) / (market.plain / market.writers)
