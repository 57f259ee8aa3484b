"""Chains of guesses that a device is making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Chains = tuple[list[list[int]], list[list[float]]]  # by sequence: tokens, and how sure the model was of each


@dataclass(frozen=True)
class MadeChains:
    """`found` [2, levels, texts] are tokens and how sure they are, in float32: good from the end of the work on, which
    `finish` waits for, until the next chains are made. There may be levels and texts that nobody asked for."""

    found: Tensor
    steps: int
    texts: int
    finish: Callable[[], None]

    @property
    def there(self) -> Tensor:
        """The tokens, flat."""
        return self.found[0].view(-1)

    def places(self, text: int, nodes: int) -> list[int]:
        """Where the first tokens of a text's chain are in that."""
        across = self.found.shape[2]
        return list(range(text, nodes * across, across))

    def wait(self) -> Chains:
        """All of them."""
        self.finish()
        tokens, sure = self.found[:, : self.steps, : self.texts].tolist()
        chains = [[int(token) for token in chain] for chain in zip(*tokens, strict=True)]
        return chains, [list(chain) for chain in zip(*sure, strict=True)]
