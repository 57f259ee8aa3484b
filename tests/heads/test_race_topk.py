"""The children of a head's nodes by the native library: those of the definition, which is `ChildSampler._odds`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.draft.heads import sampling as choosing
from foretell.draft.heads.sampling import ChildSampler, DraftTemperature, TreeInProgress
from foretell.draft.heads.tree import EagleTree
from foretell.kernels.native.library import library
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Request, Sequence
from tests.heads.test_trees import follow, waiting
from tests.tiny import HEADS, World

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")
NEARLY = 3e-6  # shares are of 32 bits
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.1},
    "warm": {"temperature": 0.7},
    "as it is": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


def plots_of(asked: list[str]) -> list[TreeInProgress]:
    """Texts with seeds, lengths and depths of their own."""
    found = []
    for i, name in enumerate(asked):
        request = Request(str(i), (0,), SamplingParams(**ASKED[name]), 1000 - 7 * i, 9)
        tree = EagleTree(Budget(9, max_depth=3))
        tree.depth = i % 3
        found.append(TreeInProgress(Sequence(i, request, [0] * (i + 1)), tree))
    return found


def agree(child_sampler: ChildSampler, logits: Tensor, plots: list[TreeInProgress]) -> None:
    """Each share is its token's own, and as large as the share of that rank: they are the best, but for rounding."""
    defined = child_sampler._odds(logits, plots)
    places = {token: place for place, token in enumerate(child_sampler.ids.tolist())}
    for found, odds in zip(child_sampler._wait_argmax(logits, plots), defined, strict=True):
        assert len(set(found.tokens)) == len(found.tokens)
        own = [float(odds[places[token]]) for token in found.tokens]
        assert found.confidence == pytest.approx(own, rel=NEARLY, abs=1e-30)
        assert found.confidence == pytest.approx(odds.topk(len(own)).values.tolist(), rel=NEARLY, abs=1e-30)


@pytest.mark.parametrize("temperature", ["fixed", "entropy"])
@pytest.mark.parametrize("width", [1, 2, 5, 16, 63, 64, 65, 1000, 12288])
def test_the_best_of_a_race_are_those_of_the_definition(width: int, temperature: DraftTemperature) -> None:
    torch.manual_seed(width)
    ids = torch.randperm(4 * width)[:width].sort().values
    for spread in (0.3, 3.0, 12.0):
        for asked in ([*ASKED], ["warm"], ["greedy"], ["greedy", "top-p"]):
            agree(ChildSampler(ids, temperature), spread * torch.randn(len(asked), width), plots_of(asked))


def test_noise_is_as_exact_at_both_ends() -> None:
    """Many lanes, even scores: those that come in first waited next to nothing."""
    agree(ChildSampler(torch.arange(1 << 21), "fixed"), torch.zeros(2, 1 << 21), plots_of(["as it is", "warm"]))


def test_what_cannot_come_is_not_ahead() -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [3, 50]] = torch.tensor([0.0, 1.0])
    (found,) = ChildSampler(torch.arange(100), "fixed")._wait_argmax(logits, plots_of(["as it is"]))
    assert {*found.tokens[:2]} == {3, 50} and not any(found.confidence[2:])
    (found,) = ChildSampler(torch.arange(100), "fixed")._wait_argmax(logits * torch.nan, plots_of(["as it is"]))
    assert len({*found.tokens}) == len(found.tokens) and not any(found.confidence)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["eagle", "eagle of two layers", "block"])
def test_a_tree_is_that_of_the_definition(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seqs = waiting(HEADS[name], World(), packed=True, **ASKED[asked])
    budgets = [Budget(nodes, max_depth=3) for nodes, _ in zip((2, 5, 14, 30, 9), seqs, strict=False)]
    found = drafter.propose(seqs, budgets)
    monkeypatch.setattr(choosing, "native_sampler_for", lambda logits: None)
    for mine, defined in zip(found, drafter.propose(seqs, budgets), strict=True):
        assert len(mine) > 0 and (mine.tokens, mine.parents) == (defined.tokens, defined.parents)
        assert mine.confidence == pytest.approx(defined.confidence, rel=NEARLY)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["eagle", "eagle with a window", "mtp"])
def test_what_wins_is_what_a_chain_draws(name: str, asked: str) -> None:
    """Place by place: each level has the noise of its own."""
    drafter, seqs = waiting(HEADS[name], World(), packed=True, **ASKED[asked])
    chains = drafter.propose(seqs, [Budget(3)] * len(seqs))
    for chain, tree in zip(chains, drafter.propose(seqs, [Budget(40, max_depth=3)] * len(seqs)), strict=True):
        assert follow(tree, chain.tokens[:2]) >= 0
