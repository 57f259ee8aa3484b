"""Custom rules as a user writes them: f(draft, probs, uniforms) -> VerifyResult."""

from __future__ import annotations

import torch

from foretell.types import Draft, VerifyResult


def _token_rule(draft: Draft, probs: torch.Tensor, uniforms: list[float], lenience: float) -> VerifyResult:
    for node, token in enumerate(draft.tokens):
        assert draft.probs is not None
        p, q = float(probs[node, token]), float(draft.probs[node, token])
        if uniforms[node] * q >= p * lenience:
            residual = (probs[node] - draft.probs[node]).clamp_min(0)
            return VerifyResult(
                tuple(range(node)), _sample(residual if residual.sum() > 0 else probs[node], uniforms[-1])
            )
    return VerifyResult(tuple(range(len(draft))), _sample(probs[-1], uniforms[-1]))


def _sample(weights: torch.Tensor, uniform: float) -> int:
    sums = weights.double().cumsum(0)
    return min(int((sums < uniform * float(sums[-1])).sum()), len(weights) - 1)


def right(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return _token_rule(draft, probs, uniforms, 1.0)


def off_by_three_percent(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return _token_rule(draft, probs, uniforms, 1.03)


def accepts_everything(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return VerifyResult(tuple(range(len(draft))), _sample(probs[-1], uniforms[-1]))


def invalid_path(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return VerifyResult((7,), 0)


def wrong_if_not_sampled(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    """Verify sampled drafts correctly; accept other draft tokens from a target probability of 0.2."""
    if draft.sampled is not None:
        return right(draft, probs, uniforms)
    for node, token in enumerate(draft.tokens):
        if float(probs[node, token]) < 0.2:
            return VerifyResult(tuple(range(node)), _sample(probs[node], uniforms[-1]))
    return VerifyResult(tuple(range(len(draft))), _sample(probs[-1], uniforms[-1]))
