"""Drafts of heads as a single CUDA graph: prepares the inputs and builds chains and trees from the outputs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol, TypeGuard

import numpy as np
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder
from foretell.draft.heads.sampling import DraftTemperature, TreeInProgress, needs_draft_probs, noise_keys
from foretell.draft.heads.tree import MAX_WIDTH, Children, EagleTree, Tree, build_from_topk
from foretell.models.draft_heads import DraftHead
from foretell.runner.heads.graph_draft import AutoregressiveHead, GraphDraft
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.prefill import GraphPrefill
from foretell.runner.heads.sampler import DraftOutput, TreeCandidates
from foretell.runner.heads.tables import DraftRow, split_batch
from foretell.sampling.sampling import truncates
from foretell.types import Sequence


def graph_draft(head: AutoregressiveHead, pages: HeadPages) -> GraphDraft:
    """Return the graph of an autoregressive head, with fused kernels where they support it."""
    features = pages.hidden_state_cache
    if has_kernels(features):
        from foretell.runner.heads.fused_draft import FusedDraft, is_fused

        if is_fused(head, pages.keys, features):
            return FusedDraft(head, pages.keys, pages.values, features, MAX_WIDTH)
    return GraphDraft(head, pages.keys, pages.values, features, MAX_WIDTH)


def graph_prefill(head: DraftHead[Any], pages: HeadPages) -> GraphPrefill:
    """Return the graph in which a head of any kind reads hidden states."""
    features = pages.hidden_state_cache
    if has_kernels(features):
        from foretell.runner.heads.fused_draft import is_fused
        from foretell.runner.heads.fused_prefill import FusedPrefill

        if is_fused(head, pages.keys, features):
            return FusedPrefill(head, pages.keys, pages.values, features, pages.page_size)
    return GraphPrefill(head, pages.keys, pages.values, features, pages.page_size)


def has_kernels(features: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a head's hidden states are on a device with Triton kernels."""
    return features is not None and features.is_cuda and find_spec("triton") is not None


def supports_single_graph(seq: Sequence, temperature: DraftTemperature) -> bool:
    """Return whether the draft of a sequence can be sampled inside a graph: without top-k, top-p and min-p, which need
    a sort, and without a temperature that depends on the entropy."""
    params = seq.request.params
    return params.temperature == 0 or (temperature == "fixed" and not truncates(params))


def draft_row(pages: HeadPages, seq: Sequence, depth: int, width: int = 1) -> DraftRow:
    """Return the graph's inputs for one sequence."""
    last, temperature = len(seq.tokens) - 1, seq.request.params.temperature
    keys = np.array(noise_keys(seq, depth) if temperature > 0 else [], np.int64)
    return DraftRow(seq.tokens[-1], last, pages.slots(seq, last - 1, last)[0], seq.pages, width, temperature, keys)


class ChainGraph(Protocol):
    """A graph that drafts chains."""

    def chain(self, rows: list[DraftRow], depth: int) -> DraftOutput: ...


def fill_chains_from_graph(
    chains: list[ChainBuilder], graph: ChainGraph, pages: HeadPages, seqs: list[Sequence], depth: int
) -> None:
    """Run the graph and append its draft tokens to the chain of each sequence."""
    rows = [draft_row(pages, seq, depth) for seq in seqs]
    wants_probs = any(map(needs_draft_probs, seqs))
    for some in split_batch(rows):
        output = graph.chain(rows[some], depth)
        _append_output(chains[some], output, output.probs if wants_probs else None)


def _append_output(chains: list[ChainBuilder], output: DraftOutput, probs: Tensor | None) -> None:
    """Append as many tokens as a step-by-step draft would have."""
    for depth, (tokens, confidences) in enumerate(zip(output.tokens, output.confidence, strict=True)):
        for row, chain in enumerate(chains):
            if chain.is_open:
                chain.append(tokens[row], confidences[row], None if probs is None else probs[depth, row])


class TreeGraph(Protocol):
    """A graph that finds the candidates of trees."""

    def tree(self, rows: list[DraftRow], depth: int) -> TreeCandidates: ...


def build_trees_from_graph(
    growing: list[TreeInProgress],
    graph: TreeGraph,
    pages: HeadPages,
    temperature: DraftTemperature,
    build: Callable[[Tree, TreeCandidates, int], None],
) -> list[TreeInProgress]:
    """Complete the trees that the graph supports, those without sampled nodes, and return the others."""
    supported = [
        each for each in growing if not needs_draft_probs(each.seq) and supports_single_graph(each.seq, temperature)
    ]
    if supported:
        depth = max(len(each.tree.max_frontier) + 1 for each in supported)
        widths = [max(each.tree.max_frontier, default=1) for each in supported]
        rows = [draft_row(pages, each.seq, depth, width) for each, width in zip(supported, widths, strict=True)]
        for some in split_batch(rows):
            candidates = graph.tree(rows[some], depth)
            for row, each in enumerate(supported[some]):
                build(each.tree, candidates, row)
    done = {id(each.tree) for each in supported}
    return [each for each in growing if id(each.tree) not in done]


def build_dynamic_tree(tree: Tree, candidates: TreeCandidates, row: int) -> None:
    """Build an EAGLE-2 tree. The graph expanded every node that the tree expands: the tree prunes more, because it
    knows how many nodes are kept in the end, and never a more likely node."""
    assert isinstance(tree, EagleTree), "a fixed tree is for sampled tokens, which are drafted level by level"
    build_from_topk(tree, candidates, row)


def build_uniform_tree(tree: Tree, candidates: TreeCandidates, row: int) -> None:
    """Build a tree whose nodes of one level all have the same children."""
    while tree.is_open:
        tokens, confidence = (part[tree.depth, row, 0].tolist() for part in (candidates.tokens, candidates.probs))
        tree.expand([Children(tokens, confidence)] * len(tree.frontier))
