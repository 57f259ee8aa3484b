"""Drafts of heads that are made in one piece: what goes to the device, and what becomes of that which comes back."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol, TypeGuard

import numpy as np
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder
from foretell.draft.heads.sampling import DraftTemperature, TreeInProgress, must_draw, noise_keys
from foretell.draft.heads.tree import MOST_WIDE, Children, EagleTree, Tree, settle
from foretell.models.draft_heads import DraftHead
from foretell.runner.heads.graph_draft import AutoregressiveHead, GraphDraft
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.prefill import GraphPrefill
from foretell.runner.heads.sampler import DraftOutput, TreeCandidates
from foretell.runner.heads.tables import DraftRow, split_batch
from foretell.sampling.sampling import truncates
from foretell.types import Sequence


def whole_steps(head: AutoregressiveHead, pages: HeadPages) -> GraphDraft:
    """For a head that guesses one token after another."""
    features = pages.state_cache
    if has_kernels(features):
        from foretell.runner.heads.fused_draft import FusedDraft, is_fused

        if is_fused(head, pages.keys, features):
            return FusedDraft(head, pages.keys, pages.values, features, MOST_WIDE)
    return GraphDraft(head, pages.keys, pages.values, features, MOST_WIDE)


def whole_reader(head: DraftHead[Any], pages: HeadPages) -> GraphPrefill:
    """For a head of any kind."""
    features = pages.state_cache
    if has_kernels(features):
        from foretell.runner.heads.fused_draft import is_fused
        from foretell.runner.heads.fused_prefill import FusedPrefill

        if is_fused(head, pages.keys, features):
            return FusedPrefill(head, pages.keys, pages.values, features, pages.page_size)
    return GraphPrefill(head, pages.keys, pages.values, features, pages.page_size)


def has_kernels(features: Tensor | None) -> TypeGuard[Tensor]:
    """Whether what a head keeps of each place lies where Triton's kernels run."""
    return features is not None and features.is_cuda and find_spec("triton") is not None


def goes_whole(seq: Sequence, temperature: DraftTemperature) -> bool:
    """Whether a text's guesses can be drawn without a look at them: tokens that are left out are found by sorting, and
    a temperature of the draft's own by their entropy."""
    params = seq.request.params
    return params.temperature == 0 or (temperature == "fixed" and not truncates(params))


def text_of(pages: HeadPages, seq: Sequence, depth: int, wide: int = 1) -> DraftRow:
    """A text as the device sees it."""
    place, heat = len(seq.tokens) - 1, seq.request.params.temperature
    keys = np.array(noise_keys(seq, depth) if heat > 0 else [], np.int64)
    return DraftRow(seq.tokens[-1], place, pages.slots(seq, place - 1, place)[0], seq.pages, wide, heat, keys)


class Chaining(Protocol):
    """What makes chains in one piece."""

    def chain(self, texts: list[DraftRow], depth: int) -> DraftOutput: ...


def chain_whole(chains: list[ChainBuilder], head: Chaining, pages: HeadPages, seqs: list[Sequence], depth: int) -> None:
    """Hang on each text's chain what is guessed for it."""
    texts = [text_of(pages, seq, depth) for seq in seqs]
    tells = any(map(must_draw, seqs))  # else nobody asks what guesses were drawn from
    for some in split_batch(texts):
        found = head.chain(texts[some], depth)
        _hang(chains[some], found, found.probs if tells else None)


def _hang(chains: list[ChainBuilder], found: DraftOutput, probs: Tensor | None) -> None:
    """As far as each would have been asked for one by one."""
    for depth, (tokens, sure) in enumerate(zip(found.tokens, found.confidence, strict=True)):
        for text, chain in enumerate(chains):
            if chain.goes_on:
                chain.append(tokens[text], sure[text], None if probs is None else probs[depth, text])


class Growing(Protocol):
    """What makes trees in one piece."""

    def tree(self, texts: list[DraftRow], depth: int) -> TreeCandidates: ...


def grow_whole(
    plots: list[TreeInProgress],
    head: Growing,
    pages: HeadPages,
    temperature: DraftTemperature,
    grow: Callable[[Tree, TreeCandidates, int], None],
) -> list[TreeInProgress]:
    """Grow the trees whose nodes are the tokens likeliest to be the target's; those that are left."""
    mine = [plot for plot in plots if not must_draw(plot.seq) and goes_whole(plot.seq, temperature)]
    if mine:
        depth = max(len(plot.tree.follows) + 1 for plot in mine)
        wide = [max(plot.tree.follows, default=1) for plot in mine]
        texts = [text_of(pages, plot.seq, depth, width) for plot, width in zip(mine, wide, strict=True)]
        for some in split_batch(texts):
            grown = head.tree(texts[some], depth)
            for row, plot in enumerate(mine[some]):
                grow(plot.tree, grown, row)
    grown_trees = {id(plot.tree) for plot in mine}
    return [plot for plot in plots if id(plot.tree) not in grown_trees]


def grow_from(tree: Tree, grown: TreeCandidates, row: int) -> None:
    """Grow the tree of one text from what was looked at. All that a tree follows was: it leaves out more than was left
    out there, for it knows how many nodes are kept in the end, and never something likelier."""
    assert isinstance(tree, EagleTree), "a shape that is settled is for tokens that are drawn one by one"
    settle(tree, grown, row)


def grow_alike(tree: Tree, grown: TreeCandidates, row: int) -> None:
    """The same where all nodes of a level have the same children."""
    while tree.goes_on:
        tokens, shares = (part[tree.depth, row, 0].tolist() for part in (grown.tokens, grown.probs))
        tree.grow([Children(tokens, shares)] * len(tree.level))
