"""What lies in a device's memory, and how many texts there is room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .drafter_cost import DrafterCost
from .steps import ACTIVATION, LOGIT, Placed

GIB = 1 << 30
PAGE = 16  # tokens
USABLE = 0.9  # of a device's memory
RUNTIME = {"gpu": 1.0 * GIB, "cpu": 0.25 * GIB}  # the runtime itself, recorded steps and their like
CHUNK = 2048  # rows of a step that reads prompts


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    weights: float
    draft: float
    text: float  # cache of one text, that of a draft model included
    workspace: float
    usable: float
    texts: int

    @property
    def cache(self) -> float:
        return self.texts * self.text

    @property
    def total(self) -> float:
        return self.weights + self.draft + self.cache + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def most_texts(self) -> int:
        """How many there is room for, however many were asked for."""
        left = self.usable - self.weights - self.draft - self.workspace
        return max(0, int(left // self.text))


def memory_of(target: Placed, guesser: DrafterCost, texts: int, context: int, length: int) -> Memory:
    """With so many texts of so many tokens, and drafts of so many."""
    pages = math.ceil((context + length + 1) / PAGE)
    shape = target.shape
    logits = texts * (length + 1) * shape.vocab * LOGIT
    activations = CHUNK * (4 * shape.width + 2 * shape.ffn / target.split) * ACTIVATION
    return Memory(
        weights=target.weight_bytes,
        draft=guesser.weight_bytes,
        text=pages * PAGE * (target.token_bytes + guesser.token_bytes),
        workspace=logits + activations + RUNTIME[target.device.family],
        usable=USABLE * target.device.memory,
        texts=texts,
    )
