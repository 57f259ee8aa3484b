"""Draft chains of one step under construction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.runner.native.head_draft import DraftResult
from foretell.types import NO_DRAFT, Budget, Draft, chain_parents


@dataclass(frozen=True)
class DraftTokens:
    """One draft token for each sequence of a batch."""

    tokens: list[int]
    confidence: list[float]
    probs: Tensor | None = None  # [sequences, vocab]: the distributions they were sampled from


@dataclass
class ChainBuilder:
    """The draft chain of one sequence. It stays open while its path confidence reaches `min_confidence`."""

    budget: Budget
    min_confidence: float
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # [draft vocab] for each token that was sampled
    chain_probs: Tensor | None = None  # [tokens, target vocab], where the whole chain was sampled in one call
    path_confidence: float = 1.0  # product of the confidences so far

    @property
    def is_open(self) -> bool:
        """Return whether another token may follow. Earlier tokens alone decide that: a rule that looked at the next
        token would bias sampled drafts."""
        return len(self.tokens) < self.budget.depth and self.path_confidence >= self.min_confidence

    def append(self, token: int, confidence: float, probs: Tensor | None = None) -> None:
        """Add a draft token, and the distribution it was sampled from."""
        self.tokens.append(token)
        self.confidence.append(confidence)
        self.path_confidence *= confidence
        if probs is not None:
            self.probs.append(probs)

    def stacked_probs(self) -> Tensor | None:
        """Return the distributions of all tokens, [tokens, vocab], or None if nothing was sampled."""
        return torch.stack(self.probs) if self.probs else None

    def draft(self, source: str, is_sampled: bool | None = None, probs: Tensor | None = None) -> Draft:
        """Return the chain as a draft; `is_sampled` None: none of its tokens was sampled."""
        nodes = min(len(self.tokens), self.budget.depth)
        if not nodes:
            return NO_DRAFT
        return Draft(
            tokens=tuple(self.tokens[:nodes]),
            parents=chain_parents(nodes),
            source=source,
            sampled=None if is_sampled is None else (is_sampled,) * nodes,
            confidence=tuple(self.confidence[:nodes]),
            probs=probs,
        )


def extend_chains(chains: list[ChainBuilder], draft_tokens: DraftTokens, confidence: list[float] | None = None) -> bool:
    """Append one draft token to each open chain and return whether any chain is still open.

    `confidence` replaces that of the draft tokens, for heads that predict their own.
    """
    for i, chain in enumerate(chains):
        if chain.is_open:
            probs = None if draft_tokens.probs is None else draft_tokens.probs[i]
            chain.append(draft_tokens.tokens[i], (confidence or draft_tokens.confidence)[i], probs)
    return any(chain.is_open for chain in chains)


def fill_chains(chains: list[ChainBuilder], result: DraftResult) -> None:
    """Append the draft tokens that one native call produced for each chain."""
    for i, chain in enumerate(chains):
        chain.chain_probs = None if result.probs is None else result.probs[i]
    for tokens, confidences in zip(result.tokens, result.confidence, strict=True):
        for chain, token, confidence in zip(chains, tokens, confidences, strict=True):
            if token >= 0 and chain.is_open:
                chain.append(token, confidence)
