"""How a step's rows go through a model: the plain way, layer by layer in torch. Faster ways are its twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretell.kernels.attention import AttentionLayout, group_spans
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder, ForwardBatch
from foretell.sampling.cuda_sampler import SamplingBatch

from .batch_layout import BatchLayout


@dataclass(frozen=True)
class StepOutput:
    """Logits: for each share that reaches its end a row after its last token and one after each node of its draft."""

    logits: Tensor  # [rows, vocab]
    hidden_states: Tensor | None  # [tokens run, taps * width]
    argmax: Callable[[], list[int]] | None = None  # of each row, where the executor has them; it waits for them


class Executor(Protocol):
    """Runs packed rows and writes their keys and values into the cache."""

    def __call__(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput: ...


class StepTokens(NamedTuple):
    """The tokens of a step's rows, and of each row the likeliest ones where they were asked for."""

    tokens: list[int]
    top_tokens: list[list[int]]


class AsyncStep(NamedTuple):
    """A step that was given to a device behind another one; `landed` waits for that one's tokens, not for this step."""

    output: StepOutput
    wait_previous_tokens: Callable[[], StepTokens]


class AsyncExecutor(Protocol):
    """An executor that works beside the host, and takes a step before the host knows the tokens it begins with."""

    num_steps: int  # that were run so far: what one has left is good until the next

    def forward_async(
        self, packed: BatchLayout, taps: tuple[int, ...], draws: SamplingBatch | None, top: int
    ) -> AsyncStep | None:
        """Behind the last step, which left a row of logits for each of its sequences: a token below 0 is what row
        -1 - token of it comes to, the likeliest or what `draws` make of it. `top` is how many of the likeliest are
        wanted of that step. What the last step left is lost; None, and nothing done, where this is too much."""

    def forward_device_draft(self, packed: BatchLayout, taps: tuple[int, ...], guesses: Tensor) -> StepOutput:
        """A step behind guesses that the device is making: a token below 0 is what comes to stand at -1 - token there.
        Its rows are few enough to be run in one pass."""


class EagerExecutor:
    """The definition: every other executor gives what this one gives."""

    def __init__(self, model: Decoder, cache: KVCache, layout: AttentionLayout) -> None:
        self.model, self.cache, self.layout = model, cache, layout

    def __call__(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        device = self.layout.device
        table = torch.from_numpy(packed.table).to(device)
        batch = ForwardBatch(table[0], table[1], table[2], group_spans(packed.spans, self.layout))
        states, tapped = self.model(batch, self.cache, taps)
        if len(packed.wanted) < packed.rows:
            states = states[torch.tensor(packed.wanted, dtype=torch.long, device=device)]
        return StepOutput(self.model.logits(states), torch.cat(tapped, -1) if tapped else None)
