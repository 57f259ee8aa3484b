"""What heads learn from: the target's states over a batch, taken while training runs and never written to disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.decoder import Decoder

from .dense_forward import CausalAttend, last_norm, make_tables, output_rows, run_dense
from .token_dataset import Batch, Batches

ROWS = 4096  # of logits over the whole vocabulary at a time
ROOM = 0.6  # of a GPU's free memory that states may be kept in


@dataclass(frozen=True)
class Goal:
    """What the target says after some places, over the tokens a head may guess."""

    probs: Tensor  # [n, outputs]: of all its probability, not scaled up to one
    best: Tensor  # [n] its likeliest token, by the target's ids
    best_draft: Tensor  # [n] the same by the head's ids, -1 where the head has no such token


@dataclass(frozen=True)
class States:
    """A batch as the target saw it."""

    batch: Batch
    features: Tensor  # [rows, length, taps * width]
    last: Tensor  # [rows, length, width], what the output matrix reads

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.batch.tokens, self.batch.learnt, self.features, self.last))


class Capture:
    """Runs the frozen target over batches."""

    def __init__(self, target: Decoder, taps: tuple[int, ...], context: int) -> None:
        self.target, self.taps = target, taps
        self.tables = make_tables(target, context)
        self.attend = CausalAttend(target.config.scale, target.config.windows)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> States:
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, tapped = run_dense(self.target, self.tables, batch.tokens, places, self.attend, self.taps)
        features = torch.cat(tapped, -1) if tapped else x[..., :0]
        return States(batch, features, last_norm(self.target, x))

    @torch.no_grad()
    def goal(self, last: Tensor, ids: Tensor) -> Goal:
        """What the target says behind these states [n, width], worked out anew: logits are too large to keep."""
        rows = output_rows(self.target)
        mine = rows if len(ids) == len(rows) else rows[ids]
        where = torch.full((len(rows),), -1, device=ids.device)
        where[ids] = torch.arange(len(ids), device=ids.device)
        parts = [_said(piece, rows, mine, len(ids) == len(rows)) for piece in torch.split(last, ROWS)]
        probs, best = torch.cat([p for p, _ in parts]), torch.cat([b for _, b in parts])
        return Goal(probs, best, where[best])


class KeptStates:
    """The states of each step's batch, kept on a GPU for the next time it comes as far as there is room."""

    def __init__(self, capture: Capture, batches: Batches) -> None:
        self.capture, self.batches = capture, batches
        self._kept: dict[int, States] = {}
        self._room = 0
        if batches.device.type == "cuda":
            self._room = int(ROOM * torch.cuda.mem_get_info(batches.device)[0])

    def at(self, step: int) -> States:
        number = self.batches.number(step)
        if number in self._kept:
            return self._kept[number]
        states = self.capture(self.batches.at(step))
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
