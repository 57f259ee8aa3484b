"""What heads draw for their trees keeps the law: every outcome of the draws that serve, with its exact probability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import Context, ToyDrafter, bias, toy_language, without
from foretell.certify.toy import ToyLanguage as Toy
from foretell.draft.heads.sampling import ChildSampler, TreeInProgress
from foretell.draft.heads.tree import FixedTree, RankAcceptance
from foretell.draft.mix import merge_drafts
from foretell.sampling import noise
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, Sequence
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, Rule

NEARLY, CLEARLY = 1e-6, 1e-2  # shares are of 32 bits
SHAPES = {
    "siblings": [(-1, 0), (-1, 1), (-1, 2)],
    "two levels": [(-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0)],
    "three levels": [(-1, 0), (0, 0), (1, 0), (-1, 1), (0, 1)],
    "more siblings than tokens": [(-1, 0), (-1, 1), (-1, 2), (-1, 3), (0, 0)],
    "by ranks": RankAcceptance([0.5, 0.4]).best_shape(Budget(6, max_depth=2), 9),
}

rules = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def races(shares: Tensor, count: int, chance: RandomSource) -> Tensor:
    """Noise with which so many come in first, in one of their orders: as likely as draws without replacement."""
    order, row = [], shares.double()
    while len(order) < count and row.sum() > 0:
        order.append(chance.sample(row))
        row = without(row, order[-1])
    found = torch.full_like(shares, torch.inf)
    found[order] = shares[order] * torch.arange(1.0, len(order) + 1)
    return found[None]


def drawn(shape: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> ToyDrafter:
    """A head's tree of this shape, by the code that serves; `chance` is its noise."""

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        request = Request("0", (0,), SamplingParams(temperature=1.0), 0, 9, rule="rejection")
        plot = TreeInProgress(Sequence(0, request, [0, *context]), tree := FixedTree(shape))
        child_sampler = ChildSampler(torch.arange(here.vocab), "fixed")
        while tree.is_open:
            logits = torch.stack([here.draft[(*context, *path(tree, node))] for node in tree.frontier]).log().float()
            asked = iter(zip(logits.softmax(-1), map(tree.num_children, tree.frontier), strict=True))
            monkeypatch.setattr(noise, "draft_noise", lambda *key, asked=asked: races(*next(asked), chance))
            child_sampler.expand([plot], logits, [list(range(len(logits)))])
        draft = tree.draft("head")
        return Draft(draft.tokens, draft.parents, "head", draft.sampled, None, tree.sampled_probs())

    return make


def path(tree: FixedTree, node: int) -> Context:
    return () if node < 0 else (*path(tree, tree.parents[node]), tree.tokens[node])


@rules
@pytest.mark.parametrize("shape", [SHAPES["siblings"], SHAPES["two levels"]])
def test_they_do_where_every_token_may_come(
    rule: Rule, shape: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bias(toy_language("random", 3, 6, seed=2), drawn(shape, monkeypatch), rule, 2) < NEARLY


@rules
@shapes
def test_drawn_trees_keep_the_law(rule: Rule, shape: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert bias(toy_language("zeros", 3, 6, seed=2), drawn(shape, monkeypatch), rule, 2) < NEARLY


@rules
def test_so_do_another_drafters_guesses_behind_them(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = drawn(SHAPES["two levels"], monkeypatch)

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        fixed = Draft((2, 1), (-1, 0), "fixed")
        return merge_drafts([fixed, mine(here, context, chance)], 7, "both", sampled=True)

    assert bias(toy_language("zeros", 3, 6, seed=3), make, rule, 2) < NEARLY


@rules
def test_rows_that_keep_who_is_out_are_seen(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: siblings drawn without replacement, judged as if they were with it."""
    honest = drawn(SHAPES["siblings"], monkeypatch)

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        draft = honest(here, context, chance)
        assert draft.probs is not None
        return Draft(draft.tokens, draft.parents, "", draft.sampled, None, draft.probs[[0] * len(draft)])

    assert bias(toy_language("random", 3, 6, seed=2), make, rule, 2) > CLEARLY


@rules
def test_a_tree_cut_by_what_was_drawn_is_seen(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: EAGLE-2's choice of the likeliest nodes is for guesses that were not drawn."""
    honest = drawn(SHAPES["siblings"], monkeypatch)

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        draft = honest(here, context, chance)
        assert draft.probs is not None
        likely = [node for node, token in enumerate(draft.tokens) if float(draft.probs[0, token]) > 0.3]
        return draft.subset(likely)

    assert bias(toy_language("random", 3, 6, seed=2), make, rule, 2) > CLEARLY
