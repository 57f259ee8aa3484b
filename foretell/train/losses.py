"""How far a head's guesses are from what the target says, by the share of guesses that would stand.

`plain_loss` defines it; `rows_loss` gives the same value and gradient without keeping logits of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHARPNESS = 3.0  # of the change from KL to total variation
ROWS = 4096  # whose logits are there at a time
FUSED_ROWS = 16_384  # the same where nothing else is worked out beside them
TINY = 1e-20


@dataclass(frozen=True)
class Mix:
    """How much each part weighs. `lk` goes over from KL to total variation as guesses get better (arXiv 2602.23881)."""

    kl: float = 0.0
    tv: float = 0.0
    ce: float = 0.0
    lk: bool = False


LK = Mix(lk=True)
DSPARK = Mix(ce=0.1, tv=1.8)  # 0.9 of the L1 distance, which is twice the total variation


@dataclass(frozen=True)
class Rows:
    """What a loss is taken over: a row for each guess."""

    goals: Tensor  # [places, outputs] the target's probabilities, of all it says
    which: Tensor  # [n] of them
    label: Tensor  # [n] the text's own token by the head's ids, -1 where it has none
    weight: Tensor  # [n]

    @property
    def probs(self) -> Tensor:
        """[n, outputs], a copy."""
        return self.goals[self.which]

    def piece(self, part: slice) -> Rows:
        return Rows(self.goals, self.which[part], self.label[part], self.weight[part])


@dataclass(frozen=True)
class Scored:
    """`loss` is the weighted sum; the rest is told row by row, without gradient."""

    loss: Tensor
    alpha: Tensor  # [n] the chance that a drawn guess stands
    guess: Tensor  # [n] the likeliest token by the head's ids


def plain_loss(logits: Tensor, rows: Rows, mix: Mix) -> Scored:
    """The definition. logits [n, outputs] in float32."""
    p, logq = rows.probs.float(), logits.log_softmax(-1)
    kl = (p * (p.clamp_min(TINY).log() - logq)).sum(-1)
    alpha = torch.minimum(p, logq.exp()).sum(-1)
    ce = -logq.gather(-1, rows.label.clamp_min(0)[:, None])[:, 0] * (rows.label >= 0)
    share = torch.exp(-SHARPNESS * alpha.detach())
    each = mix.kl * kl + mix.tv * (1 - alpha) + mix.ce * ce
    if mix.lk:
        each = each + share * kl + (1 - share) * (1 - alpha)
    return Scored((each * rows.weight).sum(), alpha.detach(), logits.argmax(-1))


def rows_loss(
    states: Tensor, output: Tensor, rows: Rows, mix: Mix, hints: Tensor | None = None, nudge: Tensor | None = None
) -> Scored:
    """`plain_loss` of logits states @ output' (+ hints @ nudge'); gradients go to all but `output`, which is lent."""
    loss, alpha, guess = _RowsLoss.apply(  # type: ignore[no-untyped-call]
        states, hints, nudge, output, rows, mix
    )
    return Scored(loss, alpha, guess)


class _RowsLoss(torch.autograd.Function):
    """The gradient is worked out on the way, piece by piece, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        hints: Tensor | None,
        nudge: Tensor | None,
        output: Tensor,
        rows: Rows,
        mix: Mix,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_states = torch.empty_like(states)
        d_hints = None if hints is None else torch.empty_like(hints)
        d_nudge = None if nudge is None else torch.zeros_like(nudge, dtype=torch.float32)
        losses, alphas, guesses = [], [], []
        fused = _is_fused(states, output)
        size = FUSED_ROWS if fused else ROWS
        for start in range(0, len(states), size):
            piece = slice(start, start + size)
            logits = F.linear(states[piece], output)
            if hints is not None and nudge is not None:
                logits = logits.float().add_(F.linear(hints[piece], nudge))
            loss, alpha, guess, slope = (_fused_slope if fused else _slope)(logits, rows.piece(piece), mix)
            slope = slope.to(states.dtype)
            torch.mm(slope, output, out=d_states[piece])
            if hints is not None and nudge is not None and d_hints is not None and d_nudge is not None:
                torch.mm(slope, nudge, out=d_hints[piece])
                d_nudge += slope.T @ hints[piece]
            losses.append(loss)
            alphas.append(alpha)
            guesses.append(guess)
        ctx.slopes = (d_states, d_hints, None if d_nudge is None or nudge is None else d_nudge.to(nudge.dtype))
        alpha, guess = torch.cat(alphas), torch.cat(guesses)
        ctx.mark_non_differentiable(alpha, guess)
        return torch.stack(losses).sum(), alpha, guess

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        scale = slopes[0]
        d_states, d_hints, d_nudge = (None if each is None else each * scale.to(each.dtype) for each in ctx.slopes)
        return d_states, d_hints, d_nudge, None, None, None


def _slope(logits: Tensor, rows: Rows, mix: Mix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted loss, the chance to stand and the likeliest token by row, and the gradient by logit."""
    guess, p, logq = logits.argmax(-1), rows.probs.float(), logits.float().log_softmax(-1)
    q = logq.exp()
    kl = (torch.special.entr(p).neg_() - p * logq).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    share = torch.exp(-SHARPNESS * alpha) if mix.lk else torch.zeros_like(alpha)
    by_kl, by_tv = share + mix.kl, (1 - share + mix.tv) if mix.lk else share + mix.tv
    each = by_kl * kl + by_tv * (1 - alpha)
    below = q * (q < p)  # what more of a token would still add to what stands
    slope = (by_kl * p.sum(-1) + by_tv * below.sum(-1))[:, None] * q - by_kl[:, None] * p - by_tv[:, None] * below
    if mix.ce:
        known = (rows.label >= 0).float()
        at = rows.label.clamp_min(0)[:, None]
        each = each - mix.ce * known * logq.gather(-1, at)[:, 0]
        slope += (mix.ce * known)[:, None] * q
        slope.scatter_add_(-1, at, -(mix.ce * known)[:, None])
    return (each * rows.weight).sum(), alpha, guess, slope * rows.weight[:, None]


def _is_fused(states: Tensor, output: Tensor) -> bool:
    """A row's logits are read once on a GPU where they fit into one program's registers; torch reads them 20 times."""
    if states.device.type != "cuda":
        return False
    from foretell.kernels.triton.distill_loss import MAX_OUTPUTS

    return len(output) <= MAX_OUTPUTS


def _fused_slope(logits: Tensor, rows: Rows, mix: Mix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_slope` in one launch; the gradient takes the logits' place."""
    from foretell.kernels.triton.distill_loss import LossWeights, distill_loss

    parts = LossWeights(mix.kl, mix.tv, mix.ce, mix.lk, SHARPNESS)
    loss, alpha, guess = distill_loss(logits, rows.goals, rows.which, rows.label, rows.weight, parts)
    return loss.sum(), alpha, guess, logits


def surety_loss(logit: Tensor, alpha: Tensor, weight: Tensor) -> Tensor:
    """How far a confidence head is from the chance that its guess stands."""
    return (F.binary_cross_entropy_with_logits(logit, alpha, reduction="none") * weight).sum()
