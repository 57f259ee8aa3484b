"""Trees of heads that guess one token after another: each level one step, in which a node sees its own branch alone."""

from __future__ import annotations

from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from foretell.draft.heads.sampling import ChildSampler, TreeInProgress
from foretell.draft.heads.tree import ROOT
from foretell.draft.reserved import check_reserved
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import HeadOps, StepOp, flatten_pages
from foretell.runner.native.head_draft import DraftOptions, DraftRequest, NativeChain, PrefillBuffers


class Branches:
    """Where the followed nodes of one tree are remembered: in places behind the text, which are good for guesses only.

    What is accepted of them is read again from the target's own states, like all that enters the text.
    """

    def __init__(self, plot: TreeInProgress) -> None:
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
    """How a head's steps are made; each gives logits."""

    def first(self, all_of_them: list[Branches]) -> Tensor:
        """Behind the last token of each text."""

    def level(self, live: list[Branches], before: list[int]) -> Tensor:
        """Behind the nodes of each tree's level, one after the other, in places that are settled here; `before` are the
        rows of the last step that they hang on."""


def grow_trees(plots: list[TreeInProgress], steps: Steps, chooser: ChildSampler) -> None:
    """Grow all of them to their ends."""
    grown = [Branches(plot) for plot in plots]
    logits = steps.first(grown)
    chooser.grow(plots, logits, [each.stand(row) for row, each in enumerate(grown)])
    while live := [each for each in grown if each.tree.goes_on]:
        logits = steps.level(live, [row for each in live for row in each.before])
        rows: list[list[int]] = []
        for each in live:
            rows.append(each.stand(sum(map(len, rows))))
        chooser.grow([each.plot for each in live], logits, rows)


class TorchSteps:
    """The definition, in torch: all texts side by side, with as many rows each."""

    def __init__(
        self, work: HeadOps, plots: list[TreeInProgress], slots: list[int], window: int | None, top: int
    ) -> None:
        """`slots` are of the places before the last of each text, `top` the tokens that are looked at, 0: all."""
        self.work, self.slots, self.window, self.top = work, slots, window, top
        widest = [max(level) for level in zip_longest(*(plot.tree.follows for plot in plots), fillvalue=0)]
        self.columns = max(len(plot.seq.tokens) for plot in plots) + sum(widest)
        self.all: list[Branches] = []
        self.behind = 0  # columns behind each text that are taken

    def first(self, all_of_them: list[Branches]) -> Tensor:
        self.all = all_of_them
        tokens, last = [each.seq.tokens[-1] for each in all_of_them], [each.text - 1 for each in all_of_them]
        job = StepOp(
            *(tokens, last, self.slots, list(range(len(last))), last, [1] * len(last), [0], self.top),
            *(self.columns, *flatten_pages([each.seq.pages for each in all_of_them])),
        )
        return self.work.run(job).logits

    def level(self, live: list[Branches], before: list[int]) -> Tensor:
        wide, depth = max(len(each.tree.level) for each in live), live[0].tree.depth
        texts, alive = len(self.all), {id(each) for each in live}
        rows = [i * wide + at for i, e in enumerate(self.all) if id(e) in alive for at in range(len(e.tree.level))]
        tokens, sources = [0] * (texts * wide), [0] * (texts * wide)  # what fills up hangs on any row
        for row, token, source in zip(rows, (t for each in live for t in each.tokens), before, strict=True):
            tokens[row], sources[row] = token, source
        for each in live:
            each.place(self.behind)
        places = [each.text - 1 + depth for each in self.all for _ in range(wide)]
        seen: list[int] = self._seen(alive, wide, depth).int().flatten().tolist()
        self.behind += wide
        text = [each.text for each in self.all]
        job = StepOp(tokens, places, sources, rows, text, seen, [depth - 1] * wide, self.top)
        return self.work.run(job).logits

    def _seen(self, alive: set[int], wide: int, depth: int) -> Tensor:
        """Which places behind its text each row sees, [texts, rows, places]; a row that fills up sees itself alone."""
        seen = torch.zeros(len(self.all), wide, self.behind + wide, dtype=torch.bool)
        seen[:, :, self.behind :] = torch.eye(wide, dtype=torch.bool)
        least = 1 if self.window is None else max(1, depth + 1 - self.window)
        for i, each in enumerate(self.all):
            if id(each) in alive:
                for row, node in enumerate(each.tree.level):
                    seen[i, row, each.of(node)[least:]] = True
        return seen


class NativeSteps:
    """The same by the native library: a row for each node, and none besides."""

    def __init__(self, native: NativeChain, pages: HeadPages, features: Tensor, along: PrefillBuffers | None) -> None:
        """`features` [texts, width] are of the places before the last; `along` is read with the first step."""
        self.native, self.pages, self.features, self.along = native, pages, features, along

    def first(self, all_of_them: list[Branches]) -> Tensor:
        for each in all_of_them:
            check_reserved(each.seq, each.text, self.pages.page_size)
        tokens, places = [each.seq.tokens[-1] for each in all_of_them], [each.text - 1 for each in all_of_them]
        return self.native.step(_asked(tokens, places, all_of_them), self.features, DraftOptions(prefill=self.along))

    def level(self, live: list[Branches], before: list[int]) -> Tensor:
        self.features = self.features[before]
        owners = [each for each in live for _ in each.tree.level]
        ways: list[list[int]] = []
        for each in live:
            each.place(len(each.places) - 1)
            check_reserved(each.seq, each.text + len(each.places) - 1, self.pages.page_size)
            slots = self.pages.slots(each.seq, each.text - 1, each.text + len(each.places) - 1)
            ways += [[slots[place + 1] for place in each.of(node)] for node in each.tree.level]
        tokens = [token for each in live for token in each.tokens]
        places = [each.text - 1 + each.tree.depth for each in owners]
        return self.native.step(_asked(tokens, places, owners), self.features, DraftOptions(ways))


def _asked(tokens: list[int], places: list[int], owners: list[Branches]) -> DraftRequest:
    pages = [each.seq.pages for each in owners]
    return DraftRequest(tokens, places, pages, [1] * len(tokens), [0.0] * len(tokens))
