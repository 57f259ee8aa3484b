"""Chains of guesses in the making: for each text one, which goes on while it is likely enough to stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foretell.runner.native.head_draft import DraftResult
from foretell.types import Budget


@dataclass(frozen=True)
class DraftTokens:
    """One for each text."""

    tokens: Tensor  # [texts]
    confidence: list[float]
    probs: Tensor | None = None  # [texts, outputs]: what each was drawn from, where any was


@dataclass
class ChainBuilder:
    """A draft in the making, which goes on while it is likely enough to stand."""

    budget: Budget
    floor: float
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # [outputs] each
    spread: Tensor | None = None  # the same for all of them in one, over the target's tokens
    sureness: float = 1.0

    @property
    def goes_on(self) -> bool:
        """Decided by what was drawn before, never by the token to come."""
        return len(self.tokens) < self.budget.depth and self.sureness >= self.floor

    def append(self, token: int, confidence: float, probs: Tensor | None) -> None:
        self.tokens.append(token)
        self.confidence.append(confidence)
        self.sureness *= confidence
        if probs is not None:
            self.probs.append(probs)


def extend(chains: list[ChainBuilder], guesses: DraftTokens, confidence: list[float] | None = None) -> bool:
    """Hang a guess on each chain that goes on; whether any does after that."""
    tokens: list[int] = guesses.tokens.tolist()
    for i, chain in enumerate(chains):
        if chain.goes_on:
            probs = None if guesses.probs is None else guesses.probs[i]
            chain.append(tokens[i], (confidence or guesses.confidence)[i], probs)
    return any(chain.goes_on for chain in chains)


def hang(chains: list[ChainBuilder], told: DraftResult) -> None:
    """Hang on each chain what was guessed for it in one go."""
    for i, chain in enumerate(chains):
        chain.spread = None if told.probs is None else told.probs[i]
    for tokens, sure in zip(told.tokens, told.confidence, strict=True):
        for chain, token, confidence in zip(chains, tokens, sure, strict=True):
            if token >= 0 and chain.goes_on:
                chain.append(token, confidence, None)
