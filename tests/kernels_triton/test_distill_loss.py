"""The loss of one launch is the loss that torch works out, with its gradient."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.train.losses import LossRows, _fused_loss_and_gradient, _loss_and_gradient
from tests.kernels_triton.test_forward import DEVICE
from tests.train.test_losses import WEIGHTS


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_one_launch_is_the_definition(name: str, spread: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(9, 300, device=DEVICE) * spread
    goals = torch.randn(5, 400, device=DEVICE).mul(2).softmax(-1)[:, :300].contiguous()
    goals[2, 7:] = 0.0  # some of which never come
    which, label = torch.randint(5, (9,), device=DEVICE), torch.randint(-1, 300, (9,), device=DEVICE)
    rows = LossRows(goals, which, label, torch.rand(9, device=DEVICE))
    wanted = _loss_and_gradient(logits.clone(), rows, WEIGHTS[name])
    found = _fused_loss_and_gradient(logits.clone(), rows, WEIGHTS[name])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
