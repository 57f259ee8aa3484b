"""Training a small model to say what the target says, at every place of the target's texts."""

from __future__ import annotations

import torch
from torch import nn

from foretell.kernels.norm import rms_norm
from foretell.models.draft_heads import DistilledHead

from .capture import Capture, States
from .dense_forward import CausalAttend
from .losses import LK, Mix, rows_loss
from .objective import HeadMethod, Progress, goals_of, mean_weight


class DistillMethod(HeadMethod[DistilledHead]):
    """What is guessed stands only where the text so far is the target's: on its texts the draft has to be good."""

    def __init__(self, head: DistilledHead, capture: Capture, steps: int, mix: Mix = LK) -> None:
        super().__init__(head, capture)
        self.steps, self.mix = steps, mix
        layer = head.config.layer
        self.attend = CausalAttend(layer.scale, [layer.window] * head.config.layers)

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        tokens, head = states.batch.tokens, self.head
        goals = goals_of(self.capture, states, head)
        places = torch.arange(1, tokens.shape[1], device=tokens.device)  # as it is served: place 0 is not read
        said = head.step(tokens[:, 1:], head.fuse(states.features)[:, :-1], head.rope_rows(places), self.attend)
        said = rms_norm(said, head.norm.weight, head.config.layer.norm_eps)
        wanted = torch.zeros_like(states.batch.learnt[:, 1:])
        wanted[:, :-1] = states.batch.learnt[:, 2:]
        row, column = wanted.nonzero(as_tuple=True)
        rows = goals.at(row, column + 1, mean_weight(goals))
        scored = rows_loss(said[row, column], self.output, rows, self.mix)
        hit = torch.zeros_like(wanted)
        hit[row, column] = goals.hits(row, column + 1, scored)
        return Progress(scored.loss, _runs(hit, self.steps), _runs(wanted, self.steps))


def _runs(x: torch.Tensor, steps: int) -> torch.Tensor:
    """[rows, places] -> [rows, places, steps]: each place with those behind it."""
    return nn.functional.pad(x, (0, steps - 1)).unfold(1, steps, 1)
