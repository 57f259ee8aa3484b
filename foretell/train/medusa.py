"""Training Medusa heads: each learns what the target says some places on."""

from __future__ import annotations

import torch

from foretell.models.draft_heads import MedusaHead

from .capture import Capture, States
from .losses import LK, Mix, rows_loss
from .objective import HeadMethod, Progress, goals_of, mean_weight

DECAY = 0.8  # of a head's weight


class MedusaMethod(HeadMethod[MedusaHead]):
    def __init__(self, head: MedusaHead, capture: Capture, mix: Mix = LK) -> None:
        assert not head.config.own_output, "the output rows are the target's"
        super().__init__(head, capture)
        self.mix = mix

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        head, learnt = self.head, states.batch.learnt
        goals = goals_of(self.capture, states, head)
        said, weight = head(states.features), mean_weight(goals)
        hits, counted = [], []
        total = said.new_zeros((), dtype=torch.float32)
        for i in range(head.config.heads):
            wanted = torch.zeros_like(learnt)
            wanted[:, : -2 - i] = learnt[:, 2 + i :]  # the state of place t tells of t+2+i
            row, place = wanted.nonzero(as_tuple=True)
            rows = goals.at(row, place + 1 + i, weight * DECAY**i)
            scored = rows_loss(said[row, place, i], self.output, rows, self.mix)
            total = total + scored.loss
            hit = torch.zeros_like(wanted)
            hit[row, place] = goals.hits(row, place + 1 + i, scored)
            hits.append(hit)
            counted.append(wanted)
        return Progress(total, torch.stack(hits, -1), torch.stack(counted, -1))
