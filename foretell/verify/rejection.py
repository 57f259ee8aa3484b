"""The rule `rejection` (Leviathan et al., Chen et al. 2023): a guess stands as often as the target would say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.types import Draft, VerifyResult

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource

LARGEST_RATIO = 1e300  # finite, so that a weight of 0 stays 0


def rejection(draft: Draft, probs: Tensor, chance: RandomSource) -> VerifyResult:
    """Try siblings in turn, each against what the ones before it left over of the target's distribution.

    probs [nodes + 1, vocab] are the target's distributions, row 0 after the root, row i + 1 after node i. Exact for
    siblings drawn with or without replacement, since each is judged by its own row of `draft.probs`. Siblings must
    stand in the order they were drawn, and whether a drawn node is here may not depend on its own token.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        child, left = _first_standing(draft, node, probs[node + 1].double(), chance)
        if child is None:
            return VerifyResult(tuple(path), chance.pick(left))
        path.append(child)


def _first_standing(draft: Draft, node: int, left: Tensor, chance: RandomSource) -> tuple[int | None, Tensor]:
    """The child of `node` that stands, if any, and what the children tried so far leave of the distribution."""
    for child in draft.children(node):
        guess, token = guess_of(draft, child, left), draft.tokens[child]
        if chance.flip(min(1.0, ratio(float(left[token]), float(guess[token]))), child):
            return child, left
        left = scaled((left - guess).clamp_min(0), left)
    return None, left


def is_drawn(draft: Draft, node: int) -> bool:
    return draft.sampled is not None and draft.sampled[node]


def guess_of(draft: Draft, node: int, like: Tensor) -> Tensor:
    """The distribution node `node` came from, [vocab]: all on its token where it was not drawn at random."""
    if is_drawn(draft, node):
        assert draft.probs is not None, "a node drawn at random comes with the distribution it was drawn from"
        return draft.probs[node].to(like)
    guess = like.new_zeros(like.shape)
    guess[draft.tokens[node]] = 1
    return guess


def ratio(wanted: float, offered: float) -> float:
    """How many times likelier the target finds a token than its drafter did; a token offered with 0 is underflow."""
    if offered == 0:
        return float(wanted > 0)
    return min(wanted / offered, LARGEST_RATIO)


def scaled(rest: Tensor, fallback: Tensor) -> Tensor:
    """`rest` scaled to sum to 1. Nothing is left only where two distributions agree to the last bit."""
    total = rest.sum()
    return rest / total if total > 0 else fallback
