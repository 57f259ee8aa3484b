"""Tuning a small target itself to foretell several tokens: its layers learn to say more, and to speak as before."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from foretell.build.model_source import ModelSource
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import MedusaHead, TargetWeights, write_head

from .batches import Batches
from .capture import Capture, States
from .dense_forward import last_norm, output_rows, run_dense
from .losses import Mix, Rows, rows_loss
from .medusa import DECAY
from .model_files import write_model
from .objective import Goals, Method, Progress, goals_of, mean_weight

HEADS = "heads"  # the folder of the heads, in that of the model
ASIDE = 0.2  # how much foretelling weighs beside speaking as before
SAME = Mix(kl=1.0)


class StreamingMethod(Method):
    """The target's layers and the heads on it are trained together; embedding, last norm and output stay."""

    def __init__(self, target: Decoder, head: MedusaHead, capture: Capture, opened: ModelSource, mix: Mix) -> None:
        self.tuned, self.head, self.capture, self.opened, self.mix = copy.deepcopy(target), head, capture, opened, mix
        head.share_weights(TargetWeights.of(self.tuned))
        self.everything = torch.arange(target.config.vocab, device=target.embed.device)

    def trained(self) -> list[nn.Parameter]:
        own = list(self.tuned.blocks.parameters())
        for each in own:
            each.requires_grad_(True)
        return [*own, *self.head.trainable_parameters()]

    def state(self) -> dict[str, Tensor]:
        blocks = {f"blocks.{name}": each for name, each in self.tuned.blocks.state_dict().items()}
        return blocks | {f"head.{name}": each for name, each in self.head.own_state_dict().items()}

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        tokens, learnt = states.batch.tokens, states.batch.learnt
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, _ = run_dense(self.tuned, self.capture.tables, tokens, places, self.capture.attend)
        goals = goals_of(self.capture, states, self.head)
        weight = mean_weight(goals)
        total = self._as_before(last_norm(self.tuned, x), states, weight)
        said = self.head(x)
        hits, counted = [], []
        for i in range(self.head.config.heads):
            wanted = torch.zeros_like(learnt)
            wanted[:, : -2 - i] = learnt[:, 2 + i :]
            loss, hit = self._ahead(said, wanted, i, goals, ASIDE * weight * DECAY**i)
            total = total + loss
            hits.append(hit)
            counted.append(wanted)
        return Progress(total, torch.stack(hits, -1), torch.stack(counted, -1))

    def _as_before(self, last: Tensor, states: States, weight: float) -> Tensor:
        """How far the tuned target is from what it said before, at every place to learn."""
        wanted = torch.zeros_like(states.batch.learnt)
        wanted[:, :-1] = states.batch.learnt[:, 1:]
        before = self.capture.goal(states.last[wanted], self.everything)
        every = torch.arange(len(before.best), device=last.device)
        rows = Rows(before.probs, every, before.best, torch.full(before.best.shape, weight, device=last.device))
        return rows_loss(last[wanted], output_rows(self.tuned), rows, SAME).loss

    def _ahead(self, said: Tensor, wanted: Tensor, i: int, goals: Goals, weight: float) -> tuple[Tensor, Tensor]:
        row, place = wanted.nonzero(as_tuple=True)
        assert self.head.output.weight is not None, "a head in training has its weights"
        rows = goals.at(row, place + 1 + i, weight)
        scored = rows_loss(said[row, place, i], self.head.output.weight, rows, self.mix)
        hit = torch.zeros_like(wanted)
        hit[row, place] = goals.hits(row, place + 1 + i, scored)
        return scored.loss, hit

    def write(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """The tuned model, and in a folder within it the heads."""
        write_model(self.tuned, self.opened, folder)
        config = self.head.config
        self.head.config = replace(config, accuracy=accuracy)
        write_head(self.head, folder / HEADS)
        self.head.config = config


@torch.no_grad()
def perplexity(model: Decoder, capture: Capture, batches: Batches) -> float:
    """Of the tokens to learn, as this model finds them."""
    loss, count = 0.0, 0
    for batch in batches.in_order():
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, _ = run_dense(model, capture.tables, batch.tokens, places, capture.attend)
        wanted = torch.zeros_like(batch.learnt)
        wanted[:, :-1] = batch.learnt[:, 1:]
        logits = nn.functional.linear(last_norm(model, x)[wanted], output_rows(model)).float()
        after = torch.zeros_like(batch.tokens)
        after[:, :-1] = batch.tokens[:, 1:]
        loss += float(nn.functional.cross_entropy(logits, after[wanted], reduction="sum"))
        count += int(wanted.sum())
    return math.exp(loss / max(1, count))
