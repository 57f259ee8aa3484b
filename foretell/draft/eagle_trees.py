"""Trees of heads that guess one token after another: each level one step, in which a node sees its own branch alone."""

from __future__ import annotations

from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from foretell.models.heads import DistilledHead, EagleHead, MtpHead
from foretell.runner.native_head import Asked, Beside, LaidOut, NativeChain

from .choosing import Chooser, Plot
from .growing import ROOT
from .heads_pages import HeadPages, Look

ALONE = torch.ones(1, 1, dtype=torch.bool)

SteppingHead = EagleHead | MtpHead | DistilledHead


class Branches:
    """Where the followed nodes of one tree are remembered: in places behind the text, which are good for guesses only.

    What is accepted of them is read again from the target's own states, like all that enters the text.
    """

    def __init__(self, plot: Plot) -> None:
        self.tree, self.seq, self.text = plot.tree, plot.seq, len(plot.seq.tokens)
        self.plot = plot
        self.places: dict[int, int] = {ROOT: -1}  # behind the text, whose last token is the root
        self.rows: dict[int, int] = {}  # of the last step, by node

    def of(self, node: int) -> list[int]:
        """The places on the way to a node, from the root's on, its own the last."""
        found = [self.places[node]]
        while node != ROOT:
            node = self.tree.parents[node]
            found.append(self.places[node])
        return found[::-1]

    def place(self, first: int) -> None:
        """The level's nodes are remembered from the place `first` on."""
        self.places.update({node: first + at for at, node in enumerate(self.tree.level)})

    def stand(self, row: int) -> list[int]:
        """The level's nodes are rows of the step from `row` on."""
        self.rows = {node: row + at for at, node in enumerate(self.tree.level)}
        return list(self.rows.values())

    @property
    def before(self) -> list[int]:
        """The rows of the last step that the level's nodes hang on."""
        return [self.rows[self.tree.parents[node]] for node in self.tree.level]

    @property
    def tokens(self) -> list[int]:
        return [self.tree.tokens[node] for node in self.tree.level]


class Steps(Protocol):
    """How a head's steps are made; each gives logits, and the features behind its rows."""

    def first(self, all_of_them: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the last token of each text, whose place before has this feature."""

    def level(self, live: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the nodes of each tree's level, one after the other, in places that are settled here."""


def grow_trees(plots: list[Plot], steps: Steps, chooser: Chooser, features: Tensor) -> None:
    """Grow all of them to their ends. `features` [texts, width] are of the places before the last."""
    grown = [Branches(plot) for plot in plots]
    logits, features = steps.first(grown, features)
    chooser.grow(plots, logits, [each.stand(row) for row, each in enumerate(grown)])
    while live := [each for each in grown if each.tree.goes_on]:
        features = features[[row for each in live for row in each.before]]
        logits, features = steps.level(live, features)
        rows: list[list[int]] = []
        for each in live:
            rows.append(each.stand(sum(map(len, rows))))
        chooser.grow([each.plot for each in live], logits, rows)


class DefinedSteps:
    """The definition, in torch: all texts side by side, with as many rows each."""

    def __init__(self, head: SteppingHead, pages: HeadPages, plots: list[Plot]) -> None:
        self.head, self.device = head, pages.device
        widest = [max(level) for level in zip_longest(*(plot.tree.follows for plot in plots), fillvalue=0)]
        longest = max(len(plot.seq.tokens) for plot in plots)
        self.memory = pages.memory([plot.seq for plot in plots], longest + sum(widest))
        self.all: list[Branches] = []
        self.behind = 0  # columns behind each text that are taken

    def first(self, all_of_them: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        self.all = all_of_them
        table = torch.tensor([[e.seq.tokens[-1], e.text - 1] for e in all_of_them], device=self.device).T
        look = Look(self.memory, self.head.config.layer, [each.text - 1 for each in all_of_them], ALONE, hidden=1)
        return self._finish(self.head.step(table[0], features, self.head.turn(table[1]), look))

    def level(self, live: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        wide, depth = max(len(each.tree.level) for each in live), live[0].tree.depth
        texts, alive = len(self.all), {id(each) for each in live}
        rows = [i * wide + at for i, e in enumerate(self.all) if id(e) in alive for at in range(len(e.tree.level))]
        tokens = torch.zeros(texts * wide, dtype=torch.int64)
        tokens[rows] = torch.tensor([token for each in live for token in each.tokens])
        padded = features.new_zeros(texts * wide, features.shape[-1])
        padded[rows] = features
        places = torch.tensor([each.text - 1 + depth for each in self.all], device=self.device)
        for each in live:
            each.place(self.behind)
        seen = self._seen(alive, wide, depth)
        text, reach = [each.text for each in self.all], (depth - 1,) * wide
        look = Look(self.memory, self.head.config.layer, text, seen.to(self.device), hidden=1, reach=reach)
        turn = self.head.turn_behind(places.repeat_interleave(wide))
        self.behind += wide
        return self._finish(self.head.step(tokens.to(self.device), padded, turn, look)[rows])

    def _seen(self, alive: set[int], wide: int, depth: int) -> Tensor:
        """Which places behind its text each row sees, [texts, rows, places]; a row that fills up sees itself alone."""
        seen = torch.zeros(len(self.all), wide, self.behind + wide, dtype=torch.bool)
        seen[:, :, self.behind :] = torch.eye(wide, dtype=torch.bool)
        least = 1 if self.head.config.layer.window is None else max(1, depth + 1 - self.head.config.layer.window)
        for i, each in enumerate(self.all):
            if id(each) in alive:
                for row, node in enumerate(each.tree.level):
                    seen[i, row, each.of(node)[least:]] = True
        return seen

    def _finish(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.logits(states), self.head.carry(states)


class NativeSteps:
    """The same by the native library: a row for each node, and none besides."""

    def __init__(self, native: NativeChain, pages: HeadPages, along: LaidOut | None) -> None:
        """`along` is read with the first step."""
        self.native, self.pages, self.along = native, pages, along

    def first(self, all_of_them: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        tokens, places = [each.seq.tokens[-1] for each in all_of_them], [each.text - 1 for each in all_of_them]
        return self.native.step(_asked(tokens, places, all_of_them), features, Beside(along=self.along)), features

    def level(self, live: list[Branches], features: Tensor) -> tuple[Tensor, Tensor]:
        owners = [each for each in live for _ in each.tree.level]
        ways: list[list[int]] = []
        for each in live:
            each.place(len(each.places) - 1)
            slots = self.pages.slots(each.seq, each.text - 1, each.text + len(each.places) - 1)
            ways += [[slots[place + 1] for place in each.of(node)] for node in each.tree.level]
        tokens = [token for each in live for token in each.tokens]
        places = [each.text - 1 + each.tree.depth for each in owners]
        return self.native.step(_asked(tokens, places, owners), features, Beside(ways)), features


def _asked(tokens: list[int], places: list[int], owners: list[Branches]) -> Asked:
    pages = [each.seq.pages for each in owners]
    return Asked(tokens, places, pages, [1] * len(tokens), [0.0] * len(tokens))
