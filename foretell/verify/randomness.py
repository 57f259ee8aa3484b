"""Randomness of the rules: seeded noise in the engine, or an enumeration of all outcomes with their probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from foretell.sampling import noise

T = TypeVar("T")


class RandomSource(Protocol):
    """Random decisions of one step."""

    def accepts(self, probability: float, node: int) -> bool:
        """Return True with this probability. Each node has one uniform, used at most once."""

    def sample(self, weights: Tensor) -> int:
        """Sample a token in proportion to weights [vocab]; called once, for the token after the accepted path."""


@dataclass(frozen=True)
class StepRandom:
    """Noise of one step, a function of the request's seed and the position of the step's root alone.

    The key is the root and not each token's own position: rules look at uniforms of nodes after the last accepted one,
    and the next step would see those again. Every step has a root of its own.
    """

    seed: int
    root: int

    def accepts(self, probability: float, node: int) -> bool:
        seed, root = self._key(torch.device("cpu"))
        return float(noise.accept_uniforms(seed, root, torch.tensor([node]))) < probability

    def sample(self, weights: Tensor) -> int:
        """Sample by an exponential race (Gumbel-max)."""
        seed, root = self._key(weights.device)
        tokens = weights.nonzero()[:, 0]
        return int(tokens[(weights[tokens] / noise.residual_noise(seed, root, tokens)[0]).argmax()])

    def _key(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.seed], device=device), torch.tensor([self.root], device=device)


def enumerate_outcomes(run: Callable[[RandomSource], T]) -> list[tuple[float, T]]:
    """Return the value of `run` for every possible outcome of its random decisions, each with its probability."""
    outcomes: list[tuple[float, T]] = []
    pending: list[tuple[int, ...]] = [()]
    while pending:
        trace = _Trace(pending.pop())
        value = run(trace)
        outcomes.append((trace.probability, value))
        pending += trace.alternatives
    return outcomes


class _Trace:
    """A random source that replays given choices, then takes the first possible one and records the alternatives."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self.given = given
        self.taken: tuple[int, ...] = ()
        self.alternatives: list[tuple[int, ...]] = []
        self.probability = 1.0

    def accepts(self, probability: float, node: int) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def sample(self, weights: Tensor) -> int:
        return self._choose((weights.double() / weights.double().sum()).tolist())

    def _choose(self, probabilities: list[float]) -> int:
        depth = len(self.taken)
        if depth < len(self.given):
            choice = self.given[depth]
        else:
            choice, *others = [i for i, probability in enumerate(probabilities) if probability > 0]
            self.alternatives += [(*self.taken, other) for other in others]
        self.taken += (choice,)
        self.probability *= probabilities[choice]
        return choice
