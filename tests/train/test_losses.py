"""The fast loss has the value and the gradient of the plain one."""

from __future__ import annotations

import pytest
import torch

from foretell.train import losses
from foretell.train.losses import DSPARK, LK, LossRows, LossWeights, chunked_loss, reference_loss

MIXES = {"lk": LK, "dspark": DSPARK, "kl": LossWeights(kl=1.0), "tv": LossWeights(tv=1.0), "ce": LossWeights(ce=1.0)}


def case(spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LossRows]:
    torch.manual_seed(0)
    states, output = torch.randn(13, 8) * spread, torch.randn(11, 8)
    hints, nudge = torch.randn(13, 3), torch.randn(11, 3)
    probs = torch.randn(13, 16).mul(2).softmax(-1)[:, :11]  # some of what the target says cannot be guessed
    label = torch.randint(-1, 11, (13,))
    return states, output, hints, nudge, LossRows(probs.flip(0), torch.arange(13).flip(0), label, torch.rand(13))


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])  # flat, alike and sure guesses take different paths
def test_fast_is_plain(name: str, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ROWS", 5)  # several pieces
    states, output, hints, nudge, rows = case(spread)
    given = [x.clone().requires_grad_() for x in (states, hints, nudge)]
    plain = reference_loss(given[0] @ output.T + given[1] @ given[2].T, rows, MIXES[name])
    wanted = torch.autograd.grad(plain.loss, given)
    mine = [x.clone().requires_grad_() for x in (states, hints, nudge)]
    fast = chunked_loss(mine[0], output, rows, MIXES[name], mine[1], mine[2])
    found = torch.autograd.grad(fast.loss * 1.0, mine)
    torch.testing.assert_close(fast.loss, plain.loss)
    torch.testing.assert_close(fast.acceptance, plain.acceptance)
    assert torch.equal(fast.argmax, plain.argmax)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_guess_as_the_target_loses_nothing() -> None:
    logits = torch.randn(4, 9)
    rows = LossRows(logits.softmax(-1), torch.arange(4), torch.zeros(4, dtype=torch.long), torch.ones(4))
    scored = reference_loss(logits, rows, LK)
    torch.testing.assert_close(scored.loss, torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.acceptance, torch.ones(4))
