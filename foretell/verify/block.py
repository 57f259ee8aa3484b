"""The rule `block`: block verification (Sun et al. 2024, arXiv 2403.10444), on trees traversal verification (arXiv
2505.12398)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.types import Draft, VerifyResult

from .rejection import acceptance_ratio, draft_distribution, normalize_residual

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource


def block(draft: Draft, probs: Tensor, random: RandomSource) -> VerifyResult:
    """Verify a branch jointly, so that likely tokens make up for unlikely ones before them.

    Takes the arguments of `rejection` and is exact under the same conditions. On a chain it accepts at least as many
    draft tokens in expectation.
    """
    result = _visit(draft, probs, random, (), 1.0)
    assert result is not None, "the root is always accepted"
    return result


def _visit(
    draft: Draft, probs: Tensor, random: RandomSource, path: tuple[int, ...], weight: float
) -> VerifyResult | None:
    """Return the result for the last node on `path` and its subtree; None where all of it is rejected.

    `weight` is the probability that the node is accepted once everything tried below it was rejected.
    """
    node = path[-1] if path else -1
    residual = probs[node + 1].double()
    for child in draft.children(node):
        q, token = draft_distribution(draft, child, residual), draft.tokens[child]
        child_weight = min(1.0, weight * acceptance_ratio(float(residual[token]), float(q[token])))
        result = _visit(draft, probs, random, (*path, child), child_weight)
        if result is not None:
            return result
        unnormalized = (weight * residual - q).clamp_min(0)
        weight = acceptance_probability(float(unnormalized.sum()), weight)
        residual = normalize_residual(unnormalized, residual)
    if node < 0 or random.accepts(weight, node):
        return VerifyResult(path, random.sample(residual))
    return None


def acceptance_probability(residual_sum: float, weight: float) -> float:
    """Return the weight of a node after one of its children was rejected; a weight of 1 stays 1."""
    total = residual_sum + (1.0 - weight)
    return residual_sum / total if total > 0 else 1.0
