"""Known bugs, to be planted: each was seen in public code, and the draws must catch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.draft.base import Drafter, Wrapper
from foretell.types import Budget, Draft, Sequence, VerifyResult
from foretell.verify.randomness import RandomSource, StepRandom
from foretell.verify.rejection import rejection
from foretell.verify.rules import Rule


def ratio_inverted(draft: Draft, probs: Tensor, chance: RandomSource) -> VerifyResult:
    """Accepts with q / p."""
    return _by_ratio(draft, probs, chance, lambda p, q: q / max(p, 1e-9), subtract=True)


def residual_not_subtracted(draft: Draft, probs: Tensor, chance: RandomSource) -> VerifyResult:
    """Draws from all of p after a rejection."""
    return _by_ratio(draft, probs, chance, lambda p, q: p / max(q, 1e-9), subtract=False)


def coins_reused(draft: Draft, probs: Tensor, chance: RandomSource) -> VerifyResult:
    """The same coins in every step."""
    assert isinstance(chance, StepRandom)
    return rejection(draft, probs, StepRandom(chance.seed, 0))


def _by_ratio(
    draft: Draft, probs: Tensor, chance: RandomSource, ratio: Callable[[float, float], float], subtract: bool
) -> VerifyResult:
    """A chain by the token rule, with its two decisions open."""
    guesses = with_rows(draft, probs).probs
    assert guesses is not None, "every node has a row now"
    for node, token in enumerate(draft.tokens):
        row, guess = probs[node], guesses[node]
        if not chance.flip(min(1.0, ratio(float(row[token]), float(guess[token]))), node):
            rest = (row - guess).clamp_min(0) if subtract else row
            return VerifyResult(tuple(range(node)), chance.pick(rest if rest.sum() > 0 else row))
    return VerifyResult(tuple(range(len(draft))), chance.pick(probs[-1]))


class Tampered(Wrapper):
    """A drafter whose drafts are spoilt on the way out."""

    def __init__(self, inner: Drafter, spoil: Callable[[Sequence, Draft], Draft]) -> None:
        super().__init__(inner)
        self.spoil = spoil

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = self.inner.propose(seqs, budgets)
        return [self.spoil(seq, draft) if len(draft) else draft for seq, draft in zip(seqs, drafts, strict=True)]


def draft_temperature_ignored(seq: Sequence, draft: Draft) -> Draft:
    """Says it drew at temperature 1, whatever it did."""
    assert draft.probs is not None, "a drafter that draws"
    flat = draft.probs.pow(seq.request.params.temperature)
    return replace(draft, probs=flat / flat.sum(-1, keepdim=True))


def token_dropped_by_value(seq: Sequence, draft: Draft) -> Draft:
    """Keeps no token it is not sure of."""
    assert draft.confidence is not None, "a drafter that draws"
    doubtful = [sure < 0.5 for sure in draft.confidence]
    return draft.truncate(doubtful.index(True)) if True in doubtful else draft


def forbidden_token_pruned(seq: Sequence, draft: Draft) -> Draft:
    """Takes a drawn token that may not come out of the draft, instead of having it rejected."""
    allowed = seq.request.params.allowed_token_ids
    illegal = [allowed is not None and token not in allowed for token in draft.tokens]
    return draft.truncate(illegal.index(True)) if True in illegal else draft


@dataclass(frozen=True)
class KnownBug:
    """A bug in the rule or in the drafter."""

    rule: Rule | None = None
    spoil: Callable[[Sequence, Draft], Draft] | None = None

    def drafter(self, inner: Drafter) -> Drafter:
        return inner if self.spoil is None else Tampered(inner, self.spoil)


PLANTS = {
    "ratio-inverted": KnownBug(rule=ratio_inverted),
    "residual-not-subtracted": KnownBug(rule=residual_not_subtracted),
    "draft-temperature-ignored": KnownBug(spoil=draft_temperature_ignored),
    "token-dropped-by-value": KnownBug(spoil=token_dropped_by_value),
    "forbidden-token-pruned": KnownBug(spoil=forbidden_token_pruned),
    "coins-reused": KnownBug(rule=coins_reused),
}


def uniforms_of(draft: Draft, chance: RandomSource) -> list[float]:
    """Numbers in (0, 1) for a rule from outside: one for each node, and a last one for the token that follows."""
    from foretell.sampling import noise

    assert isinstance(chance, StepRandom)
    nodes = torch.arange(len(draft) + 1)
    numbers: list[float] = noise.accept_uniforms(torch.tensor([chance.seed]), torch.tensor([chance.root]), nodes)[
        0
    ].tolist()
    return numbers


def with_rows(draft: Draft, probs: Tensor) -> Draft:
    """The draft with a row for every node, so that a rule from outside needs no case: certain where not drawn."""
    if draft.probs is not None and all(draft.is_sampled(node) for node in range(len(draft))):
        return draft
    rows = torch.zeros(len(draft), probs.shape[-1], dtype=probs.dtype)
    for node, token in enumerate(draft.tokens):
        if draft.probs is not None and draft.is_sampled(node):
            rows[node] = draft.probs[node]
        else:
            rows[node, token] = 1.0
    return replace(draft, probs=rows)
