"""Known bugs of public speculative decoders, planted one by one: the distribution test must catch each."""

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


def ratio_inverted(draft: Draft, probs: Tensor, random: RandomSource) -> VerifyResult:
    """Accept with probability q / p instead of p / q."""
    return _by_ratio(draft, probs, random, lambda p, q: q / max(p, 1e-9), subtract=True)


def residual_not_subtracted(draft: Draft, probs: Tensor, random: RandomSource) -> VerifyResult:
    """Sample from p instead of the residual after a rejection."""
    return _by_ratio(draft, probs, random, lambda p, q: p / max(q, 1e-9), subtract=False)


def coins_reused(draft: Draft, probs: Tensor, random: RandomSource) -> VerifyResult:
    """Use the same uniforms in every step."""
    assert isinstance(random, StepRandom)
    return rejection(draft, probs, StepRandom(random.seed, 0))


def _by_ratio(
    draft: Draft, probs: Tensor, random: RandomSource, ratio: Callable[[float, float], float], subtract: bool
) -> VerifyResult:
    """Verify a chain by token-wise rejection with a given acceptance ratio and with or without the subtraction of q."""
    draft_probs = with_all_distributions(draft, probs).probs
    assert draft_probs is not None, "every node has a distribution now"
    for node, token in enumerate(draft.tokens):
        p, q = probs[node], draft_probs[node]
        if not random.accepts(min(1.0, ratio(float(p[token]), float(q[token]))), node):
            residual = (p - q).clamp_min(0) if subtract else p
            return VerifyResult(tuple(range(node)), random.sample(residual if residual.sum() > 0 else p))
    return VerifyResult(tuple(range(len(draft))), random.sample(probs[-1]))


class BuggyDrafter(Wrapper):
    """A drafter whose drafts are corrupted on the way out."""

    def __init__(self, inner: Drafter, corrupt: Callable[[Sequence, Draft], Draft]) -> None:
        super().__init__(inner)
        self.corrupt = corrupt

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = self.inner.propose(seqs, budgets)
        return [self.corrupt(seq, draft) if len(draft) else draft for seq, draft in zip(seqs, drafts, strict=True)]


def draft_temperature_ignored(seq: Sequence, draft: Draft) -> Draft:
    """State the distribution at temperature 1 instead of the one sampled from."""
    assert draft.probs is not None, "this bug needs a drafter that samples"
    flat = draft.probs.pow(seq.request.params.temperature)
    return replace(draft, probs=flat / flat.sum(-1, keepdim=True))


def token_dropped_by_value(seq: Sequence, draft: Draft) -> Draft:
    """Drop a sampled token of low confidence instead of having it verified."""
    assert draft.confidence is not None, "this bug needs a drafter that states its confidence"
    dropped = [confidence < 0.5 for confidence in draft.confidence]
    return draft.truncate(dropped.index(True)) if True in dropped else draft


def forbidden_token_pruned(seq: Sequence, draft: Draft) -> Draft:
    """Drop a sampled token that the request forbids instead of having it rejected."""
    allowed = seq.request.params.allowed_token_ids
    forbidden = [allowed is not None and token not in allowed for token in draft.tokens]
    return draft.truncate(forbidden.index(True)) if True in forbidden else draft


@dataclass(frozen=True)
class KnownBug:
    """A bug in the rule or in the drafter; the default is no bug."""

    rule: Rule | None = None
    corrupt: Callable[[Sequence, Draft], Draft] | None = None

    def drafter(self, inner: Drafter) -> Drafter:
        """Return the drafter with the bug, or `inner` if the bug is in the rule."""
        return inner if self.corrupt is None else BuggyDrafter(inner, self.corrupt)


KNOWN_BUGS = {
    "ratio-inverted": KnownBug(rule=ratio_inverted),
    "residual-not-subtracted": KnownBug(rule=residual_not_subtracted),
    "draft-temperature-ignored": KnownBug(corrupt=draft_temperature_ignored),
    "token-dropped-by-value": KnownBug(corrupt=token_dropped_by_value),
    "forbidden-token-pruned": KnownBug(corrupt=forbidden_token_pruned),
    "coins-reused": KnownBug(rule=coins_reused),
}


def uniforms_for(draft: Draft, random: RandomSource) -> list[float]:
    """Return numbers in (0, 1) for a custom rule: one for each node and a last one for the token that follows."""
    from foretell.sampling import noise

    assert isinstance(random, StepRandom)
    nodes = torch.arange(len(draft) + 1)
    numbers: list[float] = noise.accept_uniforms(torch.tensor([random.seed]), torch.tensor([random.root]), nodes)[
        0
    ].tolist()
    return numbers


def with_all_distributions(draft: Draft, probs: Tensor) -> Draft:
    """Return the draft with a distribution for every node, one-hot where it was not sampled.

    A custom rule then needs no special case.
    """
    if draft.probs is not None and all(draft.is_sampled(node) for node in range(len(draft))):
        return draft
    rows = torch.zeros(len(draft), probs.shape[-1], dtype=probs.dtype)
    for node, token in enumerate(draft.tokens):
        if draft.probs is not None and draft.is_sampled(node):
            rows[node] = draft.probs[node]
        else:
            rows[node, token] = 1.0
    return replace(draft, probs=rows)
