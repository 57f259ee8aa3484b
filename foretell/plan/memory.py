"""Device memory: weights, KV cache and workspace, and the largest batch that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .drafter_cost import DrafterCost
from .steps import ACTIVATION, LOGIT, DeployedModel

GIB = 1 << 30
PAGE = 16  # tokens per KV page
USABLE = 0.9  # share of device memory that may be used
RUNTIME = {"gpu": 1.0 * GIB, "cpu": 0.25 * GIB}  # bytes of the runtime, CUDA graphs and the like
CHUNK = 2048  # rows of a prefill step


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of memory on each device."""

    weights: float
    draft: float
    kv_per_sequence: float  # KV cache of one sequence, that of a draft model included
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
        """Return the largest batch that fits."""
        left = self.usable - self.weights - self.draft - self.workspace
        return max(0, int(left // self.kv_per_sequence))


def plan_memory(target: DeployedModel, drafter: DrafterCost, batch: int, context: int, length: int) -> PlannedMemory:
    """Return the memory of a batch of sequences with `context` tokens and drafts of `length` tokens."""
    pages = math.ceil((context + length + 1) / PAGE)
    shape = target.shape
    logits = batch * (length + 1) * shape.vocab * LOGIT
    activations = CHUNK * (4 * shape.width + 2 * shape.ffn / target.tensor_parallel) * ACTIVATION
    return PlannedMemory(
        weights=target.weight_bytes,
        draft=drafter.weight_bytes,
        kv_per_sequence=pages * PAGE * (target.kv_bytes_per_token + drafter.kv_bytes_per_token),
        workspace=logits + activations + RUNTIME[target.device.family],
        usable=USABLE * target.device.memory,
        batch=batch,
    )
