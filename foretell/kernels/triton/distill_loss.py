# mypy: ignore-errors
"""Distillation loss and its gradient with respect to the logits, from one pass over logits and targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_OUTPUTS = 16_384  # logits of a row, which stay in registers
LANES = 512  # logits per warp


@dataclass(frozen=True)
class LossTerms:
    """Weights of the terms of the loss; `lk` adds KL and total variation, mixed by the acceptance rate of the row."""

    kl: float
    tv: float
    ce: float
    lk: bool
    sharpness: float


@triton.jit
def _distill_loss_kernel(
    logits, probs, target_rows, labels, weights, grads, losses, acceptances, argmaxes, outputs,
    kl_weight, tv_weight, ce_weight,
    sharpness, LK: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one row; `logits` and `grads` may be the same memory."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    valid = i < outputs
    x = tl.load(logits + row * outputs + i, mask=valid, other=float("-inf")).to(tl.float32)
    p = tl.load(probs + tl.load(target_rows + row) * outputs + i, mask=valid, other=0.0).to(tl.float32)
    peak = tl.max(x, 0)
    e = tl.exp(x - peak)
    total = tl.sum(e, 0)
    q = e / total
    log_q = tl.where(valid, x - peak - tl.log(total), 0.0)
    kl = tl.sum(p * (tl.log(tl.where(p > 0, p, 1.0)) - log_q), 0)
    acceptance = tl.sum(tl.minimum(p, q), 0)
    kl_total, tv_total = kl_weight, tv_weight
    if LK:
        kl_share = tl.exp(-sharpness * acceptance)
        kl_total, tv_total = kl_total + kl_share, tv_total + 1 - kl_share
    below = tl.where(q < p, q, 0.0)
    loss = kl_total * kl + tv_total * (1 - acceptance)
    grad = (kl_total * tl.sum(p, 0) + tv_total * tl.sum(below, 0)) * q - kl_total * p - tv_total * below
    if CE:
        label = tl.load(labels + row)
        label_weight = tl.where(label >= 0, ce_weight, 0.0)
        is_label = i == label
        loss -= label_weight * tl.sum(tl.where(is_label, log_q, 0.0), 0)
        grad += label_weight * q - tl.where(is_label, label_weight, 0.0)
    weight = tl.load(weights + row)
    tl.store(grads + row * outputs + i, (grad * weight).to(grads.dtype.element_ty), mask=valid)
    tl.store(losses + row, loss * weight)
    tl.store(acceptances + row, acceptance)
    tl.store(argmaxes + row, tl.argmax(x, 0).to(tl.int64))


def distill_loss(
    logits: Tensor, probs: Tensor, target_rows: Tensor, label: Tensor, weight: Tensor, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, acceptance probability and argmax of each row of logits [n, outputs].

    The target distribution of row i is `probs[target_rows[i]]`. The gradient overwrites the logits.
    """
    count, outputs = logits.shape
    assert outputs <= MAX_OUTPUTS and logits.is_contiguous() and probs.is_contiguous()
    loss, acceptance = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    argmax = torch.empty(count, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(outputs)
    if count:
        _distill_loss_kernel[(count,)](
            *(logits, probs, target_rows, label, weight.float(), logits, loss, acceptance, argmax, outputs),
            *(terms.kl, terms.tv, terms.ce, terms.sharpness, terms.lk, terms.ce > 0, block),
            num_warps=max(4, min(32, block // LANES)),
        )
    return loss, acceptance, argmax
