"""The rule `block`: judge a whole branch at once, so that likely tokens make up for unlikely ones before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.types import Draft, VerifyResult

from .rejection import guess_of, ratio, scaled

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource


def block(draft: Draft, probs: Tensor, chance: RandomSource) -> VerifyResult:
    """Block verification (Sun et al., arXiv 2403.10444) for chains, traversal verification (2505.12398) for trees.

    Takes what `rejection` takes and is exact where that is. On a chain it accepts at least as many in expectation.
    """
    verdict = _visit(draft, probs, chance, (), 1.0)
    assert verdict is not None, "the root always stands"
    return verdict


def _visit(
    draft: Draft, probs: Tensor, chance: RandomSource, path: tuple[int, ...], weight: float
) -> VerifyResult | None:
    """The verdict of the last node on `path` and what hangs below it; None where neither stands.

    `weight` is the probability that the node stands, once all that was tried below it has fallen.
    """
    node = path[-1] if path else -1
    left = probs[node + 1].double()
    for child in draft.children(node):
        guess, token = guess_of(draft, child, left), draft.tokens[child]
        reach = min(1.0, weight * ratio(float(left[token]), float(guess[token])))
        verdict = _visit(draft, probs, chance, (*path, child), reach)
        if verdict is not None:
            return verdict
        rest = (weight * left - guess).clamp_min(0)
        weight = share(float(rest.sum()), weight)
        left = scaled(rest, left)
    if node < 0 or chance.flip(weight, node):
        return VerifyResult(path, chance.pick(left))
    return None


def share(rest: float, weight: float) -> float:
    """What a node that stood with `weight` stands with after a child fell and left `rest`; at weight 1 it stays 1."""
    whole = rest + (1.0 - weight)
    return rest / whole if whole > 0 else 1.0
