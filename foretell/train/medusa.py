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

from .capture import HiddenStateCapture, TargetStates
from .dense_forward import dense_forward, final_norm, output_weight
from .export import write_model
from .losses import LK, LossRows, LossWeights, chunked_loss
from .objective import HeadObjective, Objective, ObjectiveResult, PositionTargets, mean_weight, position_targets
from .token_dataset import BatchLoader

DECAY = 0.8  # of a head's weight


class MedusaObjective(HeadObjective[MedusaHead]):
    def __init__(self, head: MedusaHead, capture: HiddenStateCapture, mix: LossWeights = LK) -> None:
        assert not head.config.own_output, "the output rows are the target's"
        super().__init__(head, capture)
        self.mix = mix

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        head, learnt = self.head, states.batch.loss_mask
        goals = position_targets(self.capture, states, head)
        said, weight = head(states.hidden_states), mean_weight(goals)
        hits, counted = [], []
        total = said.new_zeros((), dtype=torch.float32)
        for i in range(head.config.heads):
            wanted = torch.zeros_like(learnt)
            wanted[:, : -2 - i] = learnt[:, 2 + i :]  # the state of place t tells of t+2+i
            row, place = wanted.nonzero(as_tuple=True)
            rows = goals.at(row, place + 1 + i, weight * DECAY**i)
            scored = chunked_loss(said[row, place, i], self.output, rows, self.mix)
            total = total + scored.loss
            hit = torch.zeros_like(wanted)
            hit[row, place] = goals.matches(row, place + 1 + i, scored)
            hits.append(hit)
            counted.append(wanted)
        return ObjectiveResult(total, torch.stack(hits, -1), torch.stack(counted, -1))


HEADS = "heads"  # the folder of the heads, in that of the model
ASIDE = 0.2  # how much foretelling weighs beside speaking as before
SAME = LossWeights(kl=1.0)


class StreamingObjective(Objective):
    """The target's layers and the heads on it are trained together; embedding, last norm and output stay."""

    def __init__(
        self, target: Decoder, head: MedusaHead, capture: HiddenStateCapture, opened: ModelSource, mix: LossWeights
    ) -> None:
        self.tuned, self.head, self.capture, self.opened, self.mix = copy.deepcopy(target), head, capture, opened, mix
        head.borrow(TargetWeights.of(self.tuned))
        self.everything = torch.arange(target.config.vocab, device=target.embed.device)

    def parameters(self) -> list[nn.Parameter]:
        own = list(self.tuned.blocks.parameters())
        for each in own:
            each.requires_grad_(True)
        return [*own, *self.head.trained()]

    def state_dict(self) -> dict[str, Tensor]:
        blocks = {f"blocks.{name}": each for name, each in self.tuned.blocks.state_dict().items()}
        return blocks | {f"head.{name}": each for name, each in self.head.own_state().items()}

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens, learnt = states.batch.tokens, states.batch.loss_mask
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, _ = dense_forward(self.tuned, self.capture.rope, tokens, places, self.capture.attend)
        goals = position_targets(self.capture, states, self.head)
        weight = mean_weight(goals)
        total = self._as_before(final_norm(self.tuned, x), states, weight)
        said = self.head(x)
        hits, counted = [], []
        for i in range(self.head.config.heads):
            wanted = torch.zeros_like(learnt)
            wanted[:, : -2 - i] = learnt[:, 2 + i :]
            loss, hit = self._ahead(said, wanted, i, goals, ASIDE * weight * DECAY**i)
            total = total + loss
            hits.append(hit)
            counted.append(wanted)
        return ObjectiveResult(total, torch.stack(hits, -1), torch.stack(counted, -1))

    def _as_before(self, last: Tensor, states: TargetStates, weight: float) -> Tensor:
        """How far the tuned target is from what it said before, at every place to learn."""
        wanted = torch.zeros_like(states.batch.loss_mask)
        wanted[:, :-1] = states.batch.loss_mask[:, 1:]
        before = self.capture.distribution(states.final_hidden[wanted], self.everything)
        every = torch.arange(len(before.argmax), device=last.device)
        rows = LossRows(before.probs, every, before.argmax, torch.full(before.argmax.shape, weight, device=last.device))
        return chunked_loss(last[wanted], output_weight(self.tuned), rows, SAME).loss

    def _ahead(
        self, said: Tensor, wanted: Tensor, i: int, goals: PositionTargets, weight: float
    ) -> tuple[Tensor, Tensor]:
        row, place = wanted.nonzero(as_tuple=True)
        assert self.head.output.weight is not None, "a head in training has its weights"
        rows = goals.at(row, place + 1 + i, weight)
        scored = chunked_loss(said[row, place, i], self.head.output.weight, rows, self.mix)
        hit = torch.zeros_like(wanted)
        hit[row, place] = goals.matches(row, place + 1 + i, scored)
        return scored.loss, hit

    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """The tuned model, and in a folder within it the heads."""
        write_model(self.tuned, self.opened, folder)
        config = self.head.config
        self.head.config = replace(config, accuracy=accuracy)
        write_head(self.head, folder / HEADS)
        self.head.config = config


@torch.no_grad()
def perplexity(model: Decoder, capture: HiddenStateCapture, batches: BatchLoader) -> float:
    """Of the tokens to learn, as this model finds them."""
    loss, count = 0.0, 0
    for batch in batches.eval_batches():
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, _ = dense_forward(model, capture.rope, batch.tokens, places, capture.attend)
        wanted = torch.zeros_like(batch.loss_mask)
        wanted[:, :-1] = batch.loss_mask[:, 1:]
        logits = nn.functional.linear(final_norm(model, x)[wanted], output_weight(model)).float()
        after = torch.zeros_like(batch.tokens)
        after[:, :-1] = batch.tokens[:, 1:]
        loss += float(nn.functional.cross_entropy(logits, after[wanted], reduction="sum"))
        count += int(wanted.sum())
    return math.exp(loss / max(1, count))
