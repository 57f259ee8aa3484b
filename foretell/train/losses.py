"""Distillation losses between a head's and the target's next-token distributions.

The acceptance probability of a sampled draft token is sum(min(p, q)) = 1 - TV(p, q) (Leviathan et al., 2023), so total
variation is the loss that matters; KL has better gradients while the two are far apart. `reference_loss` defines the
loss; `chunked_loss` computes the same value and gradient without keeping the logits of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LK_SHARPNESS = 3.0  # how fast the LK loss moves from KL to total variation as acceptance rises
CHUNK_ROWS = 4096  # rows of logits in memory at a time
FUSED_CHUNK_ROWS = 16_384  # the fused kernel needs no temporaries of the size of the logits
TINY = 1e-20  # keeps logarithms finite


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms. `lk` blends from KL to total variation as acceptance rises (arXiv 2602.23881)."""

    kl: float = 0.0
    tv: float = 0.0
    ce: float = 0.0
    lk: bool = False


LK = LossWeights(lk=True)
DSPARK = LossWeights(ce=0.1, tv=1.8)  # 0.9 of the L1 distance, which is twice the total variation


@dataclass(frozen=True)
class LossRows:
    """Targets of a loss, one row per draft token."""

    target_probs: Tensor  # [positions, outputs]: the target's probabilities, not renormalized
    indices: Tensor  # [n]: the row of `target_probs` for each draft token
    labels: Tensor  # [n]: the document's token as a draft id, -1 if the draft vocabulary lacks it
    weights: Tensor  # [n]

    @property
    def probs(self) -> Tensor:
        """Return the target's probabilities by row, [n, outputs], as a copy."""
        return self.target_probs[self.indices]

    def chunk(self, part: slice) -> LossRows:
        return LossRows(self.target_probs, self.indices[part], self.labels[part], self.weights[part])


@dataclass(frozen=True)
class LossOutput:
    """The weighted sum of a loss, and per-row values without gradient."""

    loss: Tensor
    acceptance: Tensor  # [n]: the probability that a sampled draft token is accepted
    argmax: Tensor  # [n]: the head's most likely token, as a draft id


def reference_loss(logits: Tensor, rows: LossRows, weights: LossWeights) -> LossOutput:
    """Compute the loss of float32 logits [n, outputs] by its definition."""
    p, logq = rows.probs.float(), logits.log_softmax(-1)
    kl = (p * (p.clamp_min(TINY).log() - logq)).sum(-1)
    acceptance = torch.minimum(p, logq.exp()).sum(-1)
    ce = -logq.gather(-1, rows.labels.clamp_min(0)[:, None])[:, 0] * (rows.labels >= 0)
    kl_share = torch.exp(-LK_SHARPNESS * acceptance.detach())
    each = weights.kl * kl + weights.tv * (1 - acceptance) + weights.ce * ce
    if weights.lk:
        each = each + kl_share * kl + (1 - kl_share) * (1 - acceptance)
    return LossOutput((each * rows.weights).sum(), acceptance.detach(), logits.argmax(-1))


def chunked_loss(
    states: Tensor,
    output: Tensor,
    rows: LossRows,
    weights: LossWeights,
    bias_states: Tensor | None = None,
    bias_weight: Tensor | None = None,
) -> LossOutput:
    """Compute `reference_loss` of the logits states @ output' (+ bias_states @ bias_weight').

    Gradients go to all inputs but `output`, the matrix shared with the target.
    """
    loss, acceptance, argmax = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        states, bias_states, bias_weight, output, rows, weights
    )
    return LossOutput(loss, acceptance, argmax)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, chunk by chunk, while the logits are in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        bias_states: Tensor | None,
        bias_weight: Tensor | None,
        output: Tensor,
        rows: LossRows,
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_states = torch.empty_like(states)
        d_bias = None if bias_states is None else torch.empty_like(bias_states)
        d_weight = None if bias_weight is None else torch.zeros_like(bias_weight, dtype=torch.float32)
        losses, acceptances, argmaxes = [], [], []
        fused = _is_fused(states, output)
        size = FUSED_CHUNK_ROWS if fused else CHUNK_ROWS
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = F.linear(states[part], output)
            if bias_states is not None and bias_weight is not None:
                logits = logits.float().add_(F.linear(bias_states[part], bias_weight))
            compute = _fused_loss_and_gradient if fused else _loss_and_gradient
            loss, acceptance, argmax, gradient = compute(logits, rows.chunk(part), weights)
            gradient = gradient.to(states.dtype)
            torch.mm(gradient, output, out=d_states[part])
            if bias_states is not None and bias_weight is not None and d_bias is not None and d_weight is not None:
                torch.mm(gradient, bias_weight, out=d_bias[part])
                d_weight += gradient.T @ bias_states[part]
            losses.append(loss)
            acceptances.append(acceptance)
            argmaxes.append(argmax)
        d_bias_weight = None if d_weight is None or bias_weight is None else d_weight.to(bias_weight.dtype)
        ctx.gradients = (d_states, d_bias, d_bias_weight)
        acceptance, argmax = torch.cat(acceptances), torch.cat(argmaxes)
        ctx.mark_non_differentiable(acceptance, argmax)
        return torch.stack(losses).sum(), acceptance, argmax

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = output_gradients[0]
        d_states, d_bias, d_weight = (None if each is None else each * scale.to(each.dtype) for each in ctx.gradients)
        return d_states, d_bias, d_weight, None, None, None


def _loss_and_gradient(logits: Tensor, rows: LossRows, weights: LossWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted loss, acceptance and argmax by row, and the gradient with respect to the logits."""
    argmax, p, logq = logits.argmax(-1), rows.probs.float(), logits.float().log_softmax(-1)
    q = logq.exp()
    kl = (torch.special.entr(p).neg_() - p * logq).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    kl_share = torch.exp(-LK_SHARPNESS * acceptance) if weights.lk else torch.zeros_like(acceptance)
    kl_weight = kl_share + weights.kl
    tv_weight = (1 - kl_share + weights.tv) if weights.lk else kl_share + weights.tv
    each = kl_weight * kl + tv_weight * (1 - acceptance)
    below = q * (q < p)  # only where q < p does more probability raise the acceptance
    common = (kl_weight * p.sum(-1) + tv_weight * below.sum(-1))[:, None]
    gradient = common * q - kl_weight[:, None] * p - tv_weight[:, None] * below
    if weights.ce:
        known = (rows.labels >= 0).float()
        labels = rows.labels.clamp_min(0)[:, None]
        each = each - weights.ce * known * logq.gather(-1, labels)[:, 0]
        gradient += (weights.ce * known)[:, None] * q
        gradient.scatter_add_(-1, labels, -(weights.ce * known)[:, None])
    return (each * rows.weights).sum(), acceptance, argmax, gradient * rows.weights[:, None]


def _is_fused(states: Tensor, output: Tensor) -> bool:
    """Return whether the Triton kernel applies: a row's logits must fit one program's registers.

    The kernel reads the logits once; torch reads them about 20 times.
    """
    if states.device.type != "cuda":
        return False
    from foretell.kernels.triton.distill_loss import MAX_OUTPUTS

    return len(output) <= MAX_OUTPUTS


def _fused_loss_and_gradient(
    logits: Tensor, rows: LossRows, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `_loss_and_gradient` in one kernel; the gradient overwrites the logits."""
    from foretell.kernels.triton.distill_loss import LossTerms, distill_loss

    parts = LossTerms(weights.kl, weights.tv, weights.ce, weights.lk, LK_SHARPNESS)
    loss, acceptance, argmax = distill_loss(logits, rows.target_probs, rows.indices, rows.labels, rows.weights, parts)
    return loss.sum(), acceptance, argmax, logits


def confidence_loss(logit: Tensor, acceptance: Tensor, weight: Tensor) -> Tensor:
    """Return the cross-entropy of a confidence head against the acceptance probability of its draft token."""
    return (F.binary_cross_entropy_with_logits(logit, acceptance, reduction="none") * weight).sum()
