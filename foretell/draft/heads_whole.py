"""Drafts of heads that are made in one piece: what goes to the device, and what becomes of that which comes back."""

from __future__ import annotations

from foretell.runner.cuda_heads import Grown, SteppingHead, WholeSteps
from foretell.runner.head_tables import HeadText
from foretell.types import Sequence

from .choosing import Plot
from .growing import ROOT
from .heads_pages import HeadPages
from .tree import MOST_WIDE, Children, LevelTree, Tree


def whole_steps(head: SteppingHead, pages: HeadPages) -> WholeSteps:
    """For a head that guesses one token after another."""
    assert pages.kept_features is not None, "this head keeps features"
    return WholeSteps(head, pages.keys, pages.values, pages.kept_features, MOST_WIDE)


def text_of(pages: HeadPages, seq: Sequence, wide: int = 1) -> HeadText:
    """A text as the device sees it."""
    place = len(seq.tokens) - 1
    return HeadText(seq.tokens[-1], place, pages.slots(seq, place - 1, place)[0], seq.pages, wide)


def grow_whole(plots: list[Plot], steps: WholeSteps, pages: HeadPages) -> list[Plot]:
    """Grow the trees that need no more than a head's likeliest tokens; those that are left."""
    trees = [(plot.seq, plot.tree) for plot in plots if isinstance(plot.tree, LevelTree) and not plot.races]
    if trees:
        texts = [text_of(pages, seq, tree.wide) for seq, tree in trees]
        grown = steps.tree(texts, max(tree.budget.depth for _, tree in trees))
        for row, (_, tree) in enumerate(trees):
            grow_from(tree, grown, row)
    mine = {id(tree) for _, tree in trees}
    return [plot for plot in plots if id(plot.tree) not in mine]


def grow_from(tree: Tree, grown: Grown, row: int) -> None:
    """Grow the tree of one text from what was looked at. All that a tree follows was: it leaves out more than was left
    out there, for it knows how many nodes are kept in the end, and never something likelier."""
    rows, count = {ROOT: 0}, grown.tokens.shape[-1]
    while tree.goes_on:
        depth, level = tree.depth, tree.level
        tokens, shares = grown.tokens[depth, row], grown.shares[depth, row]
        children = {node: Children(tokens[rows[node]].tolist(), shares[rows[node]].tolist()) for node in level}
        tree.grow(list(children.values()))
        followed = {at: below for below, at in enumerate(grown.followed[depth, row].tolist())}
        parents = {node: tree.parents[node] for node in tree.level}
        ranks = {node: children[parent].tokens.index(tree.tokens[node]) for node, parent in parents.items()}
        rows = {node: followed[rows[parent] * count + ranks[node]] for node, parent in parents.items()}
