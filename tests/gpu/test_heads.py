"""Draft heads on a CUDA device: lossless, and their graphs draft what the reference drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.draft.heads.graph_draft import draft_row
from foretell.draft.mix import MixDrafter
from foretell.models.draft_heads import HeadConfig
from foretell.types import Budget, Draft, Sequence
from tests.tiny import HEADS, PROMPTS, WITH_CACHE, OwnHead, World, add, generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_does_not_change_the_output(config: HeadConfig, packed: bool) -> None:
    world = World(device="cuda")
    for temperature in (0.0, 1.0):
        truth = generate(MixDrafter([]), world, temperature=temperature)
        for levels in (0, 3):
            drafter = OwnHead(config, packed=packed)
            assert generate(drafter, replace(world, levels=levels, budget=9), temperature=temperature) == truth


def waiting(config: HeadConfig, single_graph: bool, temperature: float) -> tuple[Any, list[Sequence]]:
    """Return sequences that are ready for a draft."""
    engine = World(device="cuda", budget=2).engine(drafter := OwnHead(config, single_graph=single_graph))
    prompts = enumerate(PROMPTS)
    seqs = [add(engine, str(i), each, temperature=temperature, ignore_eos=True)[0].seq for i, each in prompts]
    for _ in range(4):
        engine.step()
    for seq in seqs:
        assert seq.pending == 1 and engine.runner.reserve(seq, len(seq.tokens) + 40)
    return drafter.inner, seqs


def same(found: Draft, truth: Draft) -> bool:
    return (found.tokens, found.parents, found.confidence) == (truth.tokens, truth.parents, truth.confidence)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_replayed_draft_equals_its_eager_run_and_the_reference(config: HeadConfig, temperature: float) -> None:
    (drafter, mine), (defined, theirs) = (waiting(config, single, temperature) for single in (True, False))
    for budget in (Budget(4), Budget(14, max_depth=3)):
        budgets = [budget] * len(mine)
        drafter._graph.graphs.graphs.clear()
        runs = [drafter.propose(mine, budgets) for _ in range(4)]  # eager, captured, replayed twice
        assert all(each is not None for each in drafter._graph.graphs.graphs.values())
        for run in runs[1:]:
            assert all(map(same, run, runs[0]))
        for draft, truth in zip(runs[-1], defined.propose(theirs, budgets), strict=True):
            assert (draft.tokens, draft.parents) == (truth.tokens, truth.parents)
            assert draft.confidence == pytest.approx(truth.confidence, rel=2e-2)


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_graph_serves_other_sequences(config: HeadConfig) -> None:
    (drafter, mine), (defined, theirs) = (waiting(config, single, 0.0) for single in (True, False))
    for budget in (Budget(3), Budget(14, max_depth=3)):
        for order in ((0, 1, 2), (0, 1, 2, 4), (4, 3, 1), (2, 0, 4, 3)):
            budgets = [budget] * len(order)
            found = drafter.propose([mine[i] for i in order], budgets)
            truth = defined.propose([theirs[i] for i in order], budgets)
            assert [draft.tokens for draft in found] == [draft.tokens for draft in truth]


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_prefill_is_captured_and_stores_what_the_reference_stores(config: HeadConfig) -> None:
    (drafter, mine), (defined, theirs) = (waiting(config, single, 0.0) for single in (True, False))
    assert any(each is not None for each in drafter._graph_prefill.graphs.graphs.values())
    for seq, other in zip(mine, theirs, strict=True):
        own, slots = (
            drafter.pages.slots(seq, 1, seq.num_computed_tokens - 1),
            defined.pages.slots(other, 1, other.num_computed_tokens - 1),
        )
        for kept, truth in zip(tensors(drafter), tensors(defined), strict=True):
            torch.testing.assert_close(kept.flatten(0, 1)[own], truth.flatten(0, 1)[slots], rtol=1e-3, atol=1e-3)


def tensors(drafter: Any) -> list[torch.Tensor]:
    keys, values, states = drafter.pages.caches
    return [*keys, *values, *([] if states is None else [states])]


@pytest.mark.parametrize("name", ["eagle", "block"])
def test_a_result_is_not_overwritten_by_the_next_draft(name: str) -> None:
    """Drafts of one shape share the host buffer."""
    drafter, seqs = waiting(HEADS[name], True, 0.0)
    chain, tree = [], []
    for _ in range(2):
        for seq in seqs[:3]:
            rows = [draft_row(drafter.pages, seq, 3, 2)]
            chain.append(drafter._graph.chain(rows, 3))
            tree.append(drafter._graph.tree(rows, 3))
    for first, again in zip(range(3), range(3, 6), strict=True):
        assert chain[first].readback.is_cpu and chain[first].tokens == chain[again].tokens
        assert tree[first].probs == pytest.approx(tree[again].probs, rel=1e-3)
    assert len({str(each.probs.tolist()) for each in tree[:3]}) == 3, "sequences differ"
