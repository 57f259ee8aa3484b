"""How a step's rows go through a model: the plain way, layer by layer in torch. Faster ways are its twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretell.kernels.attention import Layout, group_spans
from foretell.kv.cache import KVCache
from foretell.models.batch import Batch
from foretell.models.decoder import Decoder

from .pack import Packed


@dataclass(frozen=True)
class StepOutput:
    """Logits: for each share that reaches its end a row after its last token and one after each node of its draft."""

    logits: Tensor  # [rows, vocab]
    features: Tensor | None  # [tokens run, taps * width]
    likeliest: Callable[[], list[int]] | None = None  # of each row, where the executor has them; it waits for them


class Executor(Protocol):
    """Runs packed rows and writes their keys and values into the cache."""

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput: ...


class EagerExecutor:
    """The definition: every other executor gives what this one gives."""

    def __init__(self, model: Decoder, cache: KVCache, layout: Layout) -> None:
        self.model, self.cache, self.layout = model, cache, layout

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        device = self.layout.device
        table = torch.from_numpy(packed.table).to(device)
        batch = Batch(table[0], table[1], table[2], group_spans(packed.spans, self.layout))
        states, tapped = self.model(batch, self.cache, taps)
        if len(packed.wanted) < packed.rows:
            states = states[torch.tensor(packed.wanted, dtype=torch.long, device=device)]
        return StepOutput(self.model.logits(states), torch.cat(tapped, -1) if tapped else None)
