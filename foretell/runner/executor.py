"""Executors: how the rows of a step run through a model. The base class says what an executor can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.kernels.attention import AttentionLayout, group_spans
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder, ForwardBatch
from foretell.sampling.cuda_sampler import SamplingBatch

from .batch_layout import BatchLayout


@dataclass(frozen=True)
class StepOutput:
    """Logits and hidden states of a step.

    A sequence whose last token ran has one row of logits after that token and one after each node of its draft.
    """

    logits: Tensor  # [rows, vocab]
    hidden_states: Tensor | None  # [tokens run, hidden layers * width]
    argmax: Callable[[], list[int]] | None = None  # waits for the argmax of each row; None: not computed


class StepTokens(NamedTuple):
    """Next token of each row of a step, and its top-k tokens where they were requested."""

    tokens: list[int]
    top_tokens: list[list[int]]


class AsyncStep(NamedTuple):
    """A step that was launched while the previous one was still running."""

    output: StepOutput
    wait_previous_tokens: Callable[[], StepTokens]  # waits for the previous step, not for this one


@dataclass(frozen=True)
class PendingChains:
    """Draft tokens of a batch that a device is still computing.

    `output` [2, steps, sequences] holds tokens and confidences as float32, padded in both dimensions. It is valid from
    `synchronize` until the next chains are drafted.
    """

    output: Tensor
    steps: int
    num_sequences: int
    synchronize: Callable[[], None]

    @property
    def token_buffer(self) -> Tensor:
        """Return all tokens as one flat tensor."""
        return self.output[0].view(-1)

    def token_indices(self, sequence: int, nodes: int) -> list[int]:
        """Return the indices in `token_buffer` of the first `nodes` draft tokens of a sequence."""
        stride = self.output.shape[2]
        return list(range(sequence, nodes * stride, stride))

    def wait(self) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the device and return the tokens and the confidences of each sequence."""
        self.synchronize()
        tokens, confidence = self.output[:, : self.steps, : self.num_sequences].tolist()
        chains = [[int(token) for token in chain] for chain in zip(*tokens, strict=True)]
        return chains, [list(chain) for chain in zip(*confidence, strict=True)]


class Executor(ABC):
    """Runs the rows of a step through a model and writes their keys and values into the KV cache.

    Each method enters inference mode itself, if it computes with torch at all.
    """

    supports_async = False  # implements `forward_async` and `forward_device_draft`
    supports_draft_chain = False  # implements `draft_chain`
    is_batch_invariant = False  # a row's bits do not depend on the other rows of the step
    num_steps = 0  # steps launched so far; counted by executors that support async scheduling

    @abstractmethod
    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Run a step; return its logits and the hidden states after `hidden_layers`."""

    def forward_async(
        self, packed: BatchLayout, hidden_layers: tuple[int, ...], draws: SamplingBatch | None, top_k: int
    ) -> AsyncStep | None:
        """Launch a step before the host knows the tokens of the previous one, which left one row per sequence.

        A token below 0 stands for the next token of row -1 - token of the previous step: its argmax, or the token
        sampled by `draws`. `top_k` tokens per row of the previous step are returned with its tokens. The previous
        step's logits are overwritten. Returns None, and launches nothing, if the step is too large.
        """
        raise NotImplementedError

    def forward_device_draft(
        self, packed: BatchLayout, hidden_layers: tuple[int, ...], draft_tokens: Tensor
    ) -> StepOutput:
        """Run a step whose draft tokens are only on the device: a token below 0 is `draft_tokens[-1 - token]`.

        The step has to fit into one pass.
        """
        raise NotImplementedError

    def draft_chain(
        self, packed: BatchLayout, steps: int, vocab: int, draws: SamplingBatch | None
    ) -> PendingChains | None:
        """Draft `steps` tokens for each sequence without a host round trip, or return None if the batch is too large.

        See `ModelRunner.draft_chain`. The spans hold all pages that their sequences may write to.
        """
        raise NotImplementedError


class EagerExecutor(Executor):
    """The reference executor, layer by layer in torch. The others return the same."""

    def __init__(self, model: Decoder, cache: KVCache, layout: AttentionLayout) -> None:
        self.model, self.cache, self.layout = model, cache, layout

    @torch.inference_mode()
    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        device = self.layout.device
        table = torch.from_numpy(packed.table).to(device)
        batch = ForwardBatch(table[0], table[1], table[2], group_spans(packed.spans, self.layout))
        states, hidden = self.model(batch, self.cache, hidden_layers)
        if len(packed.logits_indices) < packed.rows:
            states = states[torch.tensor(packed.logits_indices, dtype=torch.long, device=device)]
        return StepOutput(self.model.logits(states), torch.cat(hidden, -1) if hidden else None)
