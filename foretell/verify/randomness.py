"""The chance a rule sees: real noise in the engine, or every outcome with its exact probability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from foretell.sampling import noise

T = TypeVar("T")


class RandomSource(Protocol):
    """What happens in one step where a rule leaves it open."""

    def flip(self, probability: float, node: int) -> bool:
        """True with this probability. A node has one coin, flipped at most once."""

    def pick(self, weights: Tensor) -> int:
        """A token in proportion to its weight, of weights [vocab]; asked once, for the token after the path."""


@dataclass(frozen=True)
class StepRandom:
    """Noise of one step, from the request's seed and the position of the step's root alone.

    Keyed by the root and not by each token's own position: rules look at coins behind the place where they cut, and the
    next step would meet those again. Every step has another root.
    """

    seed: int
    root: int

    def flip(self, probability: float, node: int) -> bool:
        seed, root = self._key(torch.device("cpu"))
        return float(noise.accept_uniforms(seed, root, torch.tensor([node]))) < probability

    def pick(self, weights: Tensor) -> int:
        seed, root = self._key(weights.device)
        lanes = weights.nonzero()[:, 0]
        return int(lanes[(weights[lanes] / noise.residual_noise(seed, root, lanes)[0]).argmax()])

    def _key(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.seed], device=device), torch.tensor([self.root], device=device)


def enumerate_chance(run: Callable[[RandomSource], T]) -> list[tuple[float, T]]:
    """What `run` returns for every outcome of its flips and picks that can happen, each with its probability."""
    outcomes: list[tuple[float, T]] = []
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        trace = _Trace(waiting.pop())
        value = run(trace)
        outcomes.append((trace.probability, value))
        waiting += trace.others
    return outcomes


class _Trace:
    """Takes the given choices, then the first possible one each time, and notes the choices it passed by."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self.given = given
        self.taken: tuple[int, ...] = ()
        self.others: list[tuple[int, ...]] = []
        self.probability = 1.0

    def flip(self, probability: float, node: int) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def pick(self, weights: Tensor) -> int:
        return self._choose((weights.double() / weights.double().sum()).tolist())

    def _choose(self, probabilities: list[float]) -> int:
        at = len(self.taken)
        if at < len(self.given):
            choice = self.given[at]
        else:
            choice, *passed = [i for i, probability in enumerate(probabilities) if probability > 0]
            self.others += [(*self.taken, other) for other in passed]
        self.taken += (choice,)
        self.probability *= probabilities[choice]
        return choice
