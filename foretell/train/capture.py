"""Capture of the target's hidden states over a batch, computed during training and never written to disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder, final_logits

from .dense_forward import CausalAttention, dense_forward, final_norm, output_weight, rope_tables
from .token_dataset import BatchLoader, TrainBatch

LOGITS_ROWS = 4096  # rows of full-vocabulary logits in memory at a time
CACHE_FRACTION = 0.6  # of free GPU memory that cached hidden states may take


@dataclass(frozen=True)
class TargetDistribution:
    """The target's next-token distribution at some positions, over the draft vocabulary."""

    probs: Tensor  # [n, outputs]: not renormalized, so a row sums to less than 1 if tokens are missing
    argmax: Tensor  # [n]: the most likely token, as a target id
    draft_argmax: Tensor  # [n]: the same token as a draft id, -1 if the draft vocabulary lacks it


@dataclass(frozen=True)
class TargetStates:
    """A batch with the target's hidden states."""

    batch: TrainBatch
    hidden_states: Tensor  # [rows, length, layers * width]: outputs of the hidden layers a head reads
    final_hidden: Tensor  # [rows, length, width]: input of the output matrix

    @property
    def nbytes(self) -> int:
        tensors = (self.batch.tokens, self.batch.loss_mask, self.hidden_states, self.final_hidden)
        return sum(each.nbytes for each in tensors)


class HiddenStateCapture:
    """Runs the frozen target over batches and keeps the outputs of `hidden_layers`."""

    def __init__(self, target: Decoder, hidden_layers: tuple[int, ...], context: int) -> None:
        self.target, self.hidden_layers = target, hidden_layers
        self.rope = rope_tables(target, context)
        config = target.config
        self.attend = CausalAttention(config.scale, config.windows, config.attention_softcap)

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> TargetStates:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, layers = dense_forward(self.target, self.rope, batch.tokens, positions, self.attend, self.hidden_layers)
        hidden_states = torch.cat(layers, -1) if layers else x[..., :0]
        return TargetStates(batch, hidden_states, final_norm(self.target, x))

    @torch.no_grad()
    def distribution(self, final_hidden: Tensor, ids: Tensor) -> TargetDistribution:
        """Return the next-token distribution over `ids` for states [n, width]. Logits are too large to cache."""
        weight = output_weight(self.target)
        is_full = len(ids) == len(weight)
        draft_weight = weight if is_full else weight[ids]
        draft_id = torch.full((len(weight),), -1, device=ids.device)
        draft_id[ids] = torch.arange(len(ids), device=ids.device)
        config = self.target.config
        chunks = [
            _probs(config, states, weight, draft_weight, is_full) for states in torch.split(final_hidden, LOGITS_ROWS)
        ]
        probs, argmax = torch.cat([p for p, _ in chunks]), torch.cat([best for _, best in chunks])
        return TargetDistribution(probs, argmax, draft_id[argmax])


class HiddenStateCache:
    """Caches the hidden states of batches on the GPU, as far as memory allows. On a CPU nothing is cached."""

    def __init__(self, capture: HiddenStateCapture, batches: BatchLoader) -> None:
        self.capture, self.batches = capture, batches
        self._cache: dict[int, TargetStates] = {}
        self._free_bytes = 0
        if batches.device.type == "cuda":
            self._free_bytes = int(CACHE_FRACTION * torch.cuda.mem_get_info(batches.device)[0])

    def get(self, step: int) -> TargetStates:
        """Return the states of a step's batch."""
        index = self.batches.batch_index(step)
        if index in self._cache:
            return self._cache[index]
        states = self.capture(self.batches.get(step))
        if states.nbytes <= self._free_bytes:
            self._free_bytes -= states.nbytes
            self._cache[index] = states
        return states


def _probs(
    config: ModelConfig, states: Tensor, weight: Tensor, draft_weight: Tensor, is_full: bool
) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the draft vocabulary and the argmax over the full vocabulary."""
    logits = final_logits(config, F.linear(states, weight).float())
    total = logits.logsumexp(-1, keepdim=True)
    argmax = logits.argmax(-1)
    draft_logits = logits if is_full else final_logits(config, F.linear(states, draft_weight).float())
    return (draft_logits - total).exp_().to(states.dtype), argmax
