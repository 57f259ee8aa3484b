"""The chunked loss has the value and the gradient of the reference loss."""

from __future__ import annotations

import pytest
import torch

from foretell.train import losses
from foretell.train.losses import DSPARK, LK, LossRows, LossWeights, chunked_loss, reference_loss

WEIGHTS = {"lk": LK, "dspark": DSPARK, "kl": LossWeights(kl=1.0), "tv": LossWeights(tv=1.0), "ce": LossWeights(ce=1.0)}


def case(spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LossRows]:
    torch.manual_seed(0)
    states, output = torch.randn(13, 8) * spread, torch.randn(11, 8)
    bias_states, bias_weight = torch.randn(13, 3), torch.randn(11, 3)
    probs = torch.randn(13, 16).mul(2).softmax(-1)[:, :11]  # the draft vocabulary lacks some of the target's tokens
    label = torch.randint(-1, 11, (13,))
    rows = LossRows(probs.flip(0), torch.arange(13).flip(0), label, torch.rand(13))
    return states, output, bias_states, bias_weight, rows


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])  # flat, similar and confident distributions
def test_chunked_loss_equals_the_reference(name: str, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 5)  # several chunks
    states, output, bias_states, bias_weight, rows = case(spread)
    given = [x.clone().requires_grad_() for x in (states, bias_states, bias_weight)]
    reference = reference_loss(given[0] @ output.T + given[1] @ given[2].T, rows, WEIGHTS[name])
    wanted = torch.autograd.grad(reference.loss, given)
    mine = [x.clone().requires_grad_() for x in (states, bias_states, bias_weight)]
    chunked = chunked_loss(mine[0], output, rows, WEIGHTS[name], mine[1], mine[2])
    found = torch.autograd.grad(chunked.loss * 1.0, mine)
    torch.testing.assert_close(chunked.loss, reference.loss)
    torch.testing.assert_close(chunked.acceptance, reference.acceptance)
    assert torch.equal(chunked.argmax, reference.argmax)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_loss_is_zero_for_the_targets_distribution() -> None:
    logits = torch.randn(4, 9)
    rows = LossRows(logits.softmax(-1), torch.arange(4), torch.zeros(4, dtype=torch.long), torch.ones(4))
    scored = reference_loss(logits, rows, LK)
    torch.testing.assert_close(scored.loss, torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.acceptance, torch.ones(4))
