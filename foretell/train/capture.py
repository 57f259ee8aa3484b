"""What heads learn from: the target's states over a batch, taken while training runs and never written to disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.decoder import Decoder

from .dense_forward import CausalAttention, dense_forward, final_norm, output_weight, rope_tables
from .token_dataset import BatchLoader, TrainBatch

ROWS = 4096  # of logits over the whole vocabulary at a time
ROOM = 0.6  # of a GPU's free memory that states may be kept in


@dataclass(frozen=True)
class TargetDistribution:
    """What the target says after some places, over the tokens a head may guess."""

    probs: Tensor  # [n, outputs]: of all its probability, not scaled up to one
    argmax: Tensor  # [n] its likeliest token, by the target's ids
    draft_argmax: Tensor  # [n] the same by the head's ids, -1 where the head has no such token


@dataclass(frozen=True)
class TargetStates:
    """A batch as the target saw it."""

    batch: TrainBatch
    hidden_states: Tensor  # [rows, length, taps * width]
    final_hidden: Tensor  # [rows, length, width], what the output matrix reads

    @property
    def nbytes(self) -> int:
        return sum(
            each.nbytes for each in (self.batch.tokens, self.batch.loss_mask, self.hidden_states, self.final_hidden)
        )


class HiddenStateCapture:
    """Runs the frozen target over batches."""

    def __init__(self, target: Decoder, taps: tuple[int, ...], context: int) -> None:
        self.target, self.hidden_layers = target, taps
        self.rope = rope_tables(target, context)
        self.attend = CausalAttention(target.config.scale, target.config.windows)

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> TargetStates:
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, tapped = dense_forward(self.target, self.rope, batch.tokens, places, self.attend, self.hidden_layers)
        features = torch.cat(tapped, -1) if tapped else x[..., :0]
        return TargetStates(batch, features, final_norm(self.target, x))

    @torch.no_grad()
    def distribution(self, last: Tensor, ids: Tensor) -> TargetDistribution:
        """What the target says behind these states [n, width], worked out anew: logits are too large to keep."""
        rows = output_weight(self.target)
        mine = rows if len(ids) == len(rows) else rows[ids]
        where = torch.full((len(rows),), -1, device=ids.device)
        where[ids] = torch.arange(len(ids), device=ids.device)
        parts = [_said(piece, rows, mine, len(ids) == len(rows)) for piece in torch.split(last, ROWS)]
        probs, best = torch.cat([p for p, _ in parts]), torch.cat([b for _, b in parts])
        return TargetDistribution(probs, best, where[best])


class HiddenStateCache:
    """The states of each step's batch, kept on a GPU for the next time it comes as far as there is room."""

    def __init__(self, capture: HiddenStateCapture, batches: BatchLoader) -> None:
        self.capture, self.batches = capture, batches
        self._kept: dict[int, TargetStates] = {}
        self._room = 0
        if batches.device.type == "cuda":
            self._room = int(ROOM * torch.cuda.mem_get_info(batches.device)[0])

    def get(self, step: int) -> TargetStates:
        number = self.batches.batch_index(step)
        if number in self._kept:
            return self._kept[number]
        states = self.capture(self.batches.get(step))
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            self._kept[number] = states
        return states


def _said(states: Tensor, rows: Tensor, mine: Tensor, everything: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of the tokens whose rows are `mine`, and the likeliest of all."""
    logits = F.linear(states, rows).float()
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.argmax(-1)
    some = logits if everything else F.linear(states, mine).float()
    return (some - total).exp_().to(states.dtype), best
