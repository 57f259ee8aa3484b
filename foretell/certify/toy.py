"""Toy languages small enough to know every outcome of a step, and drafters for them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.types import Draft, VerifyResult
from foretell.verify.randomness import RandomSource, enumerate_chance
from foretell.verify.rules import Rule

Context = tuple[int, ...]
Law = dict[Context, float]


@dataclass(frozen=True)
class World:
    """The distributions of target and drafter after every context of up to `depth` tokens."""

    vocab: int
    target: dict[Context, Tensor]
    draft: dict[Context, Tensor]


Make = Callable[[World, Context, RandomSource], Draft]
Rows = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def world(kind: str, vocab: int = 3, depth: int = 5, seed: int = 0) -> World:
    random = torch.Generator().manual_seed(seed)
    contexts = [c for n in range(depth + 1) for c in itertools.product(range(vocab), repeat=n)]
    rows = {context: KINDS[kind](vocab, random) for context in contexts}
    return World(vocab, {c: row[0] for c, row in rows.items()}, {c: row[1] for c, row in rows.items()})


def _scale(row: Tensor) -> Tensor:
    return row / row.sum()


def _uneven(vocab: int, random: torch.Generator) -> Tensor:
    return _scale(torch.rand(vocab, generator=random, dtype=torch.float64) ** 2 + 0.02)


def _with_zero(row: Tensor, random: torch.Generator) -> Tensor:
    row = row.clone()
    row[int(torch.randint(len(row), (), generator=random))] = 0
    return _scale(row)


def _one_hot(row: Tensor) -> Tensor:
    return torch.eye(len(row), dtype=torch.float64)[row.argmax()]


def _random(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return _uneven(vocab, random), _uneven(vocab, random)


def _zeros(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return _with_zero(_uneven(vocab, random), random), _with_zero(_uneven(vocab, random), random)


def _equal(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    row = _uneven(vocab, random)
    return row, row.clone()


def _disjoint(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    even = torch.arange(vocab) % 2 == 0
    target, draft = _random(vocab, random)
    return _scale(target * even), _scale(draft * ~even)


def _greedy(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    target, draft = _random(vocab, random)
    return _one_hot(target), draft


def _greedy_both(vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    target, draft = _random(vocab, random)
    return _one_hot(target), _one_hot(draft)


KINDS: dict[str, Rows] = {
    "random": _random,
    "zeros": _zeros,
    "equal": _equal,
    "disjoint": _disjoint,
    "greedy": _greedy,
    "greedy both": _greedy_both,
}


class Once:
    """Passes on to another chance, and asserts that a rule meets no coin twice."""

    def __init__(self, chance: RandomSource) -> None:
        self.chance = chance
        self.met: set[int] = set()

    def flip(self, probability: float, node: int) -> bool:
        assert 0 <= probability <= 1
        assert node not in self.met
        self.met.add(node)
        return self.chance.flip(probability, node)

    def pick(self, weights: Tensor) -> int:
        assert -1 not in self.met
        assert (weights >= 0).all()
        self.met.add(-1)
        return self.chance.pick(weights)


def target_rows(here: World, context: Context, draft: Draft) -> Tensor:
    """The target's distributions after the root and after each node."""
    contexts = [context]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        contexts.append((*contexts[parent + 1], token))
    return torch.stack([here.target[c] for c in contexts])


Guard = Callable[[RandomSource], RandomSource]


def judge(
    here: World, context: Context, make: Make, rule: Rule, chance: RandomSource, guard: Guard = Once
) -> tuple[Draft, VerifyResult]:
    draft = make(here, context, chance)
    return draft, rule(draft, target_rows(here, context, draft), guard(chance))


def law_of_step(here: World, context: Context, make: Make, rule: Rule, guard: Guard = Once) -> Law:
    """Probabilities of what one step writes, the draft's own chances included."""
    law: Law = defaultdict(float)
    for probability, (draft, verdict) in enumerate_chance(
        lambda chance: judge(here, context, make, rule, chance, guard)
    ):
        law[(*(draft.tokens[node] for node in verdict.accepted_path), verdict.next_token)] += probability
    return law


def law_of(here: World, make: Make, rule: Rule, length: int, guard: Guard = Once) -> Law:
    """Probabilities of the first `length` tokens, written by steps that follow each other."""
    done: Law = defaultdict(float)
    begun: Law = defaultdict(float, {(): 1.0})
    while begun:
        context = min(begun, key=len)
        probability = begun.pop(context)
        for written, share in law_of_step(here, context, make, rule, guard).items():
            text = context + written
            (begun if len(text) < length else done)[text[:length]] += probability * share
    return done


def plain_law(rows: dict[Context, Tensor], vocab: int, length: int) -> Law:
    """The same without any drafting, token by token from `rows`."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {(*c, x): p * float(rows[c][x]) for c, p in law.items() for x in range(vocab)}
    return law


def distance(one: Law, other: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(one.get(c, 0.0) - other.get(c, 0.0)) for c in {*one, *other})


def bias(here: World, make: Make, rule: Rule, length: int, guard: Guard = Once) -> float:
    """How far text written with drafts is from the target's own."""
    return distance(law_of(here, make, rule, length, guard), plain_law(here.target, here.vocab, length))


def mean_accepted(here: World, make: Make, rule: Rule) -> float:
    outcomes = enumerate_chance(lambda chance: judge(here, (), make, rule, chance))
    return sum(probability * len(verdict.accepted_path) for probability, (_, verdict) in outcomes)


@dataclass
class Sketch:
    """A draft in the making."""

    here: World
    root: Context
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def context(self, node: int) -> Context:
        return self.root if node < 0 else (*self.context(self.parents[node]), self.tokens[node])

    def add(self, parent: int, token: int, drawn_from: Tensor | None = None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.drawn.append(drawn_from is not None)
        # A row that must not be read where the node was not drawn.
        self.rows.append(torch.full((self.here.vocab,), 0.5) if drawn_from is None else drawn_from)
        return len(self.tokens) - 1

    def finish(self) -> Draft:
        rows = torch.stack(self.rows) if self.rows else torch.zeros(0, self.here.vocab)
        return Draft(tuple(self.tokens), tuple(self.parents), "toy", tuple(self.drawn), None, rows)


def chain(width: int, stop: Callable[[Tensor, int], bool] = lambda row, token: False) -> Make:
    """Drawn tokens; `stop` sees a row and the token drawn from it, which stays in."""

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch, node = Sketch(here, context), -1
        while len(sketch.tokens) < width:
            row = here.draft[sketch.context(node)]
            node = sketch.add(node, chance.pick(row), row)
            if stop(row, sketch.tokens[node]):
                break
        return sketch.finish()

    return make


def unsure_stops(width: int) -> Make:
    """Ends the draft before a draw that would be a toss-up: looks at the row only."""

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch, node = Sketch(here, context), -1
        while len(sketch.tokens) < width and float(here.draft[sketch.context(node)].max()) > 0.5:
            row = here.draft[sketch.context(node)]
            node = sketch.add(node, chance.pick(row), row)
        return sketch.finish()

    return make


def mixed_chain(drawn: tuple[bool, ...]) -> Make:
    """Some nodes drawn, the others the drafter's likeliest token."""

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch, node = Sketch(here, context), -1
        for at_random in drawn:
            row = here.draft[sketch.context(node)]
            token = chance.pick(row) if at_random else int(row.argmax())
            node = sketch.add(node, token, row if at_random else None)
        return sketch.finish()

    return make


Shape = list["Shape"]


def tree(shape: Shape, replace: bool) -> Make:
    """Drawn siblings, with or without replacement; `shape` nests a list for each child."""

    def grow(sketch: Sketch, node: int, shape: Shape, chance: RandomSource) -> None:
        row = sketch.here.draft[sketch.context(node)]
        children = []
        for _ in shape:
            if row.sum() == 0:
                break
            children.append(sketch.add(node, chance.pick(row), row))
            row = row if replace else without(row, sketch.tokens[-1])
        for child, below in zip(children, shape, strict=False):
            grow(sketch, child, below, chance)

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch = Sketch(here, context)
        grow(sketch, -1, shape, chance)
        return sketch.finish()

    return make


def top_tree(width: int, depth: int) -> Make:
    """The `width` likeliest tokens below each node; nothing is drawn."""

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch, level = Sketch(here, context), [-1]
        for _ in range(depth):
            best = {node: here.draft[sketch.context(node)].topk(width).indices.tolist() for node in level}
            level = [sketch.add(node, token) for node in level for token in best[node]]
        return sketch.finish()

    return make


def mixed_tree(here: World, context: Context, chance: RandomSource) -> Draft:
    """A sure guess first, a drawn sibling that avoids it, a drawn one that does not, and drawn ones below."""
    sketch = Sketch(here, context)
    row = here.draft[context]
    first = sketch.add(-1, int(row.argmax()))
    rest = without(row, sketch.tokens[first])
    second = sketch.add(-1, chance.pick(rest), rest) if rest.sum() > 0 else first
    sketch.add(-1, chance.pick(row), row)
    for node in {first, second}:
        below = here.draft[sketch.context(node)]
        sketch.add(node, chance.pick(below), below)
    return sketch.finish()


def without(row: Tensor, token: int) -> Tensor:
    """`row` with a token left out; all 0 where it was the only one."""
    rest = row.clone()
    rest[token] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest
