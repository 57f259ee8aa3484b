"""Guesses one token after another from the target's states: EAGLE heads, and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend, hang
from foretell.draft.heads.base import HeadDrafter, check_reserved
from foretell.draft.heads.graph_draft import chain_whole, goes_whole, grow_from, grow_whole, whole_steps
from foretell.draft.heads.sampling import ChildSampler, TreeInProgress, draws_of, needs_draft_probs
from foretell.draft.heads.tree import MOST_WIDE, ROOT
from foretell.models.draft_heads import DistilledHead, EagleHead, MtpHead
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import EagleOps, HeadOps, StepOp, flat
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import (
    NOTHING,
    DraftRequest,
    NativeChain,
    PrefillBuffers,
    TreeSlots,
    native_for_head,
)
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence, StepResult


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
            *(self.columns, *flat([each.seq.pages for each in all_of_them])),
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
        return self.native.step(_asked(tokens, places, all_of_them), self.features, TreeSlots(along=self.along))

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
        return self.native.step(_asked(tokens, places, owners), self.features, TreeSlots(ways))


def _asked(tokens: list[int], places: list[int], owners: list[Branches]) -> DraftRequest:
    pages = [each.seq.pages for each in owners]
    return DraftRequest(tokens, places, pages, [1] * len(tokens), [0.0] * len(tokens))


class EagleDrafter(HeadDrafter):
    """At place p it keeps the pair of p's token and the feature of p-1: that depends on nothing behind p."""

    head: EagleHead | MtpHead | DistilledHead
    traits = replace(HeadDrafter.traits, prior_acceptance=0.65)

    def __init__(
        self, runner: ModelRunner, head: EagleHead | MtpHead | DistilledHead, pages: HeadPages, *settings: Any
    ) -> None:
        super().__init__(runner, head, pages, *settings)
        native = None if self.is_split else native_for_head(head)
        self._native = None if native is None else NativeChain(native, head, pages.keys, pages.values)
        if self._native is not None:
            self.read_natively(self._native, runner.hidden_layers)
        self._whole = whole_steps(head, pages) if self.traits.single_graph else None

    def read(self, readings: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        self.work.keep(slots, states)
        if any(each.stop > 1 for each in readings):  # nothing is remembered at the first place of a text
            self.work.run(self.to_read(readings, 1))

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.chains(budgets)
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            depth = max(budget.depth for budget in budgets)
            chain_whole(chains, self._whole, self.pages, seqs, depth)
            return chains
        if self._native is None:
            self._step_by_step(seqs, chains)
        elif self.draft_temperature == "fixed" or self.is_greedy(seqs):
            self._guess_natively(self._native, seqs, chains)
        else:
            self._draw_natively(self._native, seqs, chains, self.features_before(seqs))
        return chains

    def _guess_natively(self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """All in one call."""
        draws, tells = draws_of(seqs, max(chain.budget.depth for chain in chains)), any(map(needs_draft_probs, seqs))
        features = None if self.pages.kept_features is None else self.features_before(seqs)
        beside = TreeSlots(draws=draws, tells=tells, along=self.along())
        hang(chains, native.guess(self.asked(seqs, chains), features, beside))

    def along(self) -> PrefillBuffers | None:
        """What the library is to read with the first guess that it makes now."""
        return None

    def features_before(self, seqs: list[Sequence]) -> Tensor:
        """Of the places before the last, [texts, width]."""
        assert isinstance(self.work, EagleOps), "the library has whole heads alone"
        if self.pages.kept_features is None:
            return self.work.features(torch.tensor(self.slots_before(seqs)))
        return self.pages.few_features(self.slots_before(seqs))

    def grow(self, plots: list[TreeInProgress]) -> None:
        if self._whole is not None:
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grow_from)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[TreeInProgress]) -> None:
        seqs = [plot.seq for plot in plots]
        wide = MOST_WIDE if self.is_greedy(seqs) else 0
        steps: NativeSteps | TorchSteps
        if self._native is not None:
            steps = NativeSteps(self._native, self.pages, self.features_before(seqs), self.along())
        else:
            steps = TorchSteps(self.work, plots, self.slots_before(seqs), self.head.config.layer.window, wide)
        grow_trees(plots, steps, self.chooser)

    def _step_by_step(self, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """The definition."""
        depth, last = max(chain.budget.depth for chain in chains), [len(seq.tokens) - 1 for seq in seqs]
        rows, tokens = list(range(len(seqs))), [seq.tokens[-1] for seq in seqs]
        job = StepOp(
            *(tokens, last, self.slots_before(seqs), rows, last, [1] * len(seqs), [0]),
            *(int(self.is_greedy(seqs)), max(last) + depth, *flat([seq.pages for seq in seqs])),
        )
        for offset in range(depth):
            guesses = self.draw(seqs, offset, self.work.run(job).logits)
            if not extend(chains, guesses):
                break
            places = [place + offset + 1 for place in last]
            job = StepOp(guesses.tokens.tolist(), places, rows, rows, places, job.seen, job.reach, job.top)

    def _draw_natively(
        self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder], feature: Tensor
    ) -> None:
        """Of each step the logits; a chain that ended is left out, for it has no pages farther on."""
        beside = TreeSlots(along=self.along())
        for offset in range(max(chain.budget.depth for chain in chains)):
            live = [i for i, chain in enumerate(chains) if chain.goes_on]
            if not live:
                break
            if len(live) < len(chains):
                feature = feature[live]
                seqs, chains = [seqs[i] for i in live], [chains[i] for i in live]
            asked = self.asked(seqs, chains)
            if offset:
                tokens = [chain.tokens[-1] for chain in chains]
                asked = replace(asked, tokens=tokens, places=[place + offset for place in asked.places])
            extend(chains, self.draw(seqs, offset, native.step(asked, feature, beside)))
            beside = NOTHING


class DistilledDrafter(EagleDrafter):
    """Where the library guesses, what is to be read goes with the first guess, and what was guessed and stood is not
    read again: a place is remembered by its tokens alone, to the last bit, whoever came upon them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._unread: list[PrefillRange] = []
        self._guessed: dict[int, list[int]] = {}  # by sequence, the chains of the step that is under way

    def catch_up(self, readings: list[PrefillRange]) -> None:
        self._guessed = {}
        if self._native is None or self._reader is None:
            super().catch_up(readings)
        else:
            self._unread = readings

    def along(self) -> PrefillBuffers | None:
        readings, self._unread = self._unread, []
        return self._reader.laid_out(readings) if self._reader is not None and readings else None

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = super().guess(seqs, budgets)
        if self._native is not None:
            self._guessed = {seq.id: chain.tokens for seq, chain in zip(seqs, chains, strict=True)}
        return chains

    def update_kv(self, outcomes: list[StepResult]) -> None:
        super().update_kv(outcomes)
        self._guessed = {}

    def known_of(self, outcome: StepResult) -> int:
        draft, guessed = outcome.draft, self._guessed.get(outcome.scheduled.seq.id, [])
        if draft.source != self.name or list(draft.tokens) != guessed[: len(draft)]:
            return 0
        # The text's last token was looked at, and all guesses but the last.
        return min(len(guessed), outcome.scheduled.seq.cached - outcome.scheduled.start)
