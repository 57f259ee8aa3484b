# mypy: ignore-errors
"""What training descends, row by row: a loss and its gradient by logit from one reading of logits and goals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_OUTPUTS = 16_384  # of a row, all of which lies in registers at once
LANES = 512  # of them a warp takes


@dataclass(frozen=True)
class Parts:
    """How much each part of the loss weighs; `lk` adds KL and total variation by how good guesses are."""

    kl: float
    tv: float
    ce: float
    lk: bool
    sharpness: float


@triton.jit
def _slope(
    logits, probs, which, labels, weights, slopes, losses, alphas, guesses, outputs, kl_part, tv_part, ce_part,
    sharpness, LK: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row; logits and slopes may be the same memory."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < outputs
    x = tl.load(logits + row * outputs + i, mask=real, other=float("-inf")).to(tl.float32)
    p = tl.load(probs + tl.load(which + row) * outputs + i, mask=real, other=0.0).to(tl.float32)
    most = tl.max(x, 0)
    e = tl.exp(x - most)
    total = tl.sum(e, 0)
    q = e / total
    log_q = tl.where(real, x - most - tl.log(total), 0.0)
    kl = tl.sum(p * (tl.log(tl.where(p > 0, p, 1.0)) - log_q), 0)
    alpha = tl.sum(tl.minimum(p, q), 0)
    by_kl, by_tv = kl_part, tv_part
    if LK:
        share = tl.exp(-sharpness * alpha)
        by_kl, by_tv = by_kl + share, by_tv + 1 - share
    below = tl.where(q < p, q, 0.0)
    loss = by_kl * kl + by_tv * (1 - alpha)
    slope = (by_kl * tl.sum(p, 0) + by_tv * tl.sum(below, 0)) * q - by_kl * p - by_tv * below
    if CE:
        label = tl.load(labels + row)
        part = tl.where(label >= 0, ce_part, 0.0)
        mine = i == label
        loss -= part * tl.sum(tl.where(mine, log_q, 0.0), 0)
        slope += part * q - tl.where(mine, part, 0.0)
    weight = tl.load(weights + row)
    tl.store(slopes + row * outputs + i, (slope * weight).to(slopes.dtype.element_ty), mask=real)
    tl.store(losses + row, loss * weight)
    tl.store(alphas + row, alpha)
    tl.store(guesses + row, tl.argmax(x, 0).to(tl.int64))


def slope_of(
    logits: Tensor, probs: Tensor, which: Tensor, label: Tensor, weight: Tensor, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, chances to stand and guesses of rows [n, outputs], goals being `probs[which]`.

    The gradient takes the logits' place.
    """
    count, outputs = logits.shape
    assert outputs <= MOST_OUTPUTS and logits.is_contiguous() and probs.is_contiguous()
    loss, alpha = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    guess = torch.empty(count, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(outputs)
    if count:
        _slope[(count,)](
            *(logits, probs, which, label, weight.float(), logits, loss, alpha, guess, outputs),
            *(parts.kl, parts.tv, parts.ce, parts.sharpness, parts.lk, parts.ce > 0, block),
            num_warps=max(4, min(32, block // LANES)),
        )
    return loss, alpha, guess
