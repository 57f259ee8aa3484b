"""The rule `rejection`: speculative sampling (Leviathan et al. 2023, Chen et al. 2023), on trees with the multi-round
rejection of SpecInfer (Miao et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.types import Draft, VerifyResult

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource

MAX_RATIO = 1e300  # finite, so that a weight of 0 times a ratio stays 0 and is not NaN


def rejection(draft: Draft, probs: Tensor, random: RandomSource) -> VerifyResult:
    """Accept a draft token x with probability min(1, p(x) / q(x)), else sample from the residual max(p - q, 0).

    `probs` [nodes + 1, vocab] are the target's distributions p: row 0 follows the root, row i + 1 follows node i.
    Siblings are tried in order, each against the residual that the rejected ones before it left.

    The output has the target's distribution if siblings are in the order they were sampled and no sampled node was
    dropped because of its own token. Sampling with and without replacement are both exact, since each sibling is
    tested with its own row of `draft.probs`.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        child, residual = _first_accepted(draft, node, probs[node + 1].double(), random)
        if child is None:
            return VerifyResult(tuple(path), random.sample(residual))
        path.append(child)


def _first_accepted(draft: Draft, node: int, residual: Tensor, random: RandomSource) -> tuple[int | None, Tensor]:
    """Return the first accepted child of `node`, or None, and the residual after the children rejected so far."""
    for child in draft.children(node):
        q, token = draft_distribution(draft, child, residual), draft.tokens[child]
        if random.accepts(min(1.0, acceptance_ratio(float(residual[token]), float(q[token]))), child):
            return child, residual
        residual = normalize_residual((residual - q).clamp_min(0), residual)
    return None, residual


def draft_distribution(draft: Draft, node: int, like: Tensor) -> Tensor:
    """Return the distribution [vocab] that a node was sampled from; one-hot for a node that was not sampled."""
    if draft.is_sampled(node):
        assert draft.probs is not None, "a sampled node comes with the distribution it was sampled from"
        return draft.probs[node].to(like)
    one_hot = like.new_zeros(like.shape)
    one_hot[draft.tokens[node]] = 1
    return one_hot


def acceptance_ratio(p: float, q: float) -> float:
    """Return p / q for one token. A sampled token with q = 0 is an underflow: accepted if the target allows it."""
    if q == 0:
        return float(p > 0)
    return min(p / q, MAX_RATIO)


def normalize_residual(residual: Tensor, fallback: Tensor) -> Tensor:
    """Scale a residual to sum to 1. It is all zero only where p and q agree to the last bit: then keep `fallback`."""
    total = residual.sum()
    return residual / total if total > 0 else fallback
