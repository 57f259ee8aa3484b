"""What lies in a device's memory, and how many texts there is room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .drafter_cost import DrafterCost
from .steps import ACTIVATION, LOGIT, DeployedModel

GIB = 1 << 30
PAGE = 16  # tokens
USABLE = 0.9  # of a device's memory
RUNTIME = {"gpu": 1.0 * GIB, "cpu": 0.25 * GIB}  # the runtime itself, recorded steps and their like
CHUNK = 2048  # rows of a step that reads prompts


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes on each device."""

    weights: float
    draft: float
    kv_per_sequence: float  # cache of one text, that of a draft model included
    workspace: float
    usable: float
    batch: int

    @property
    def kv_cache(self) -> float:
        return self.batch * self.kv_per_sequence

    @property
    def total(self) -> float:
        return self.weights + self.draft + self.kv_cache + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def max_batch(self) -> int:
        """How many there is room for, however many were asked for."""
        left = self.usable - self.weights - self.draft - self.workspace
        return max(0, int(left // self.kv_per_sequence))


def plan_memory(target: DeployedModel, guesser: DrafterCost, texts: int, context: int, length: int) -> PlannedMemory:
    """With so many texts of so many tokens, and drafts of so many."""
    pages = math.ceil((context + length + 1) / PAGE)
    shape = target.shape
    logits = texts * (length + 1) * shape.vocab * LOGIT
    activations = CHUNK * (4 * shape.width + 2 * shape.ffn / target.tensor_parallel) * ACTIVATION
    return PlannedMemory(
        weights=target.weight_bytes,
        draft=guesser.weight_bytes,
        kv_per_sequence=pages * PAGE * (target.kv_bytes_per_token + guesser.kv_bytes_per_token),
        workspace=logits + activations + RUNTIME[target.device.family],
        usable=USABLE * target.device.memory,
        batch=texts,
    )
