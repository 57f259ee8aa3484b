"""Ways to draft in a toy language, each a function of the world, the context and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.types import Draft
from foretell.verify.randomness import RandomSource

from .toy import Context, Make, World


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
