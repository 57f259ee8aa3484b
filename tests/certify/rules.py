"""Rules as a user might write them, to be certified: f(draft, probs, uniforms) -> Verdict."""

from __future__ import annotations

import torch

from foretell.types import Draft, VerifyResult


def _token_rule(draft: Draft, probs: torch.Tensor, uniforms: list[float], lenience: float) -> VerifyResult:
    for node, token in enumerate(draft.tokens):
        assert draft.probs is not None
        wanted, offered = float(probs[node, token]), float(draft.probs[node, token])
        if uniforms[node] * offered >= wanted * lenience:
            rest = (probs[node] - draft.probs[node]).clamp_min(0)
            return VerifyResult(tuple(range(node)), _pick(rest if rest.sum() > 0 else probs[node], uniforms[-1]))
    return VerifyResult(tuple(range(len(draft))), _pick(probs[-1], uniforms[-1]))


def _pick(weights: torch.Tensor, uniform: float) -> int:
    sums = weights.double().cumsum(0)
    return min(int((sums < uniform * float(sums[-1])).sum()), len(weights) - 1)


def right(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return _token_rule(draft, probs, uniforms, 1.0)


def off_by_three_percent(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return _token_rule(draft, probs, uniforms, 1.03)


def gullible(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return VerifyResult(tuple(range(len(draft))), _pick(probs[-1], uniforms[-1]))


def broken(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    return VerifyResult((7,), 0)


def sly(draft: Draft, probs: torch.Tensor, uniforms: list[float]) -> VerifyResult:
    """Right for drawn guesses; a guess that was not drawn stands wherever the target gives it a fifth."""
    if draft.sampled is not None:
        return right(draft, probs, uniforms)
    for node, token in enumerate(draft.tokens):
        if float(probs[node, token]) < 0.2:
            return VerifyResult(tuple(range(node)), _pick(probs[node], uniforms[-1]))
    return VerifyResult(tuple(range(len(draft))), _pick(probs[-1], uniforms[-1]))
