"""Training objectives: the interface of one drafter kind in training, and plain distillation of a draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.draft_heads import DistilledHead, DraftHead, write_head

from .capture import HiddenStateCapture, TargetDistribution, TargetStates
from .dense_forward import CausalAttention
from .losses import LK, LossOutput, LossRows, LossWeights, chunked_loss


@dataclass(frozen=True)
class ObjectiveResult:
    """The loss of one batch, and which draft tokens greedy verification would accept."""

    loss: Tensor
    matches: Tensor  # [rows, positions, steps]: the draft token is the target's argmax
    mask: Tensor  # [rows, positions, steps]: the loss covers this position

    def acceptance_counts(self) -> Tensor:
        """Return [2, steps]: draft tokens accepted together with all before them, and draft tokens possible."""
        accepted = (self.matches & self.mask).cumprod(-1)
        return torch.stack([accepted.sum((0, 1)), self.mask.cumprod(-1).sum((0, 1))]).double()

    def simulate_decoding(self) -> tuple[int, int]:
        """Return tokens and steps of decoding the documents with these drafts, each step starting where one ended.

        Drafts right after a rejection are worse than others, so this gives less than the mean over all positions.
        """
        lengths = (self.matches & self.mask).cumprod(-1).sum(-1).tolist()
        tokens = steps = 0
        for row, mask in zip(lengths, self.mask[..., 0].tolist(), strict=True):
            if not any(mask):
                continue
            position, stop = mask.index(True) + 1, len(mask) - mask[::-1].index(True)
            tokens, steps = tokens + 1, steps + 1  # the prefill step, which has no draft
            while position < stop:
                num_new = min(row[position] + 1, stop - position)
                tokens, steps, position = tokens + num_new, steps + 1, position + num_new
        return tokens, steps


class Objective(ABC):
    """A drafter in training: its loss on a batch, its parameters, its checkpoint and its files."""

    hidden_layers: tuple[int, ...] = ()  # layers of the target whose states the drafter reads

    @abstractmethod
    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult: ...

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to train."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint."""

    @abstractmethod
    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """Write the drafter as it is served; `accuracy` is its conditional acceptance rate by depth."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors that `state_dict` returned."""
        own = self.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)


AnyHead = TypeVar("AnyHead", bound=DraftHead[Any])


class HeadObjective(Objective, Generic[AnyHead]):
    """Trains a draft head, which is the same module as the one served."""

    def __init__(self, head: AnyHead, capture: HiddenStateCapture) -> None:
        self.head, self.capture, self.hidden_layers = head, capture, head.config.hidden_layers

    def parameters(self) -> list[nn.Parameter]:
        return self.head.trainable_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return self.head.own_state_dict()

    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        config = self.head.config
        self.head.config = replace(config, accuracy=accuracy)
        write_head(self.head, folder)
        self.head.config = config

    @property
    def output(self) -> Tensor:
        """Return the output matrix, [outputs, width]."""
        assert self.head.output.weight is not None, "a head in training has its weights"
        return self.head.output.weight


@dataclass(frozen=True)
class PositionTargets:
    """The target's distribution at every position before a token of the loss, looked up by (row, position)."""

    target: TargetDistribution
    row: Tensor  # [rows, length]: the row of `target` for a position, -1 if it has none
    tokens: Tensor  # [rows, length]
    draft_ids: Tensor  # [vocab]: the draft id of each token, -1 if the draft vocabulary lacks it

    def at(self, row: Tensor, position: Tensor, weight: float | Tensor) -> LossRows:
        """Return the loss targets of the tokens after these positions."""
        indices = self.row[row, position]
        labels = self.draft_ids[self.tokens[row, position + 1]]
        weights = torch.full(indices.shape, weight, device=indices.device) if isinstance(weight, float) else weight
        return LossRows(self.target.probs, indices, labels, weights)

    def matches(self, row: Tensor, position: Tensor, output: LossOutput) -> Tensor:
        """Return whether the draft tokens after these positions are the target's argmax."""
        return output.argmax == self.target.draft_argmax[self.row[row, position]]


def position_targets(capture: HiddenStateCapture, states: TargetStates, head: DraftHead[Any]) -> PositionTargets:
    """Compute the target's distributions once per batch; every draft step reads rows of them."""
    loss_mask = states.batch.loss_mask
    mask = torch.zeros_like(loss_mask)
    mask[:, :-1] = loss_mask[:, 1:]
    row = torch.full(loss_mask.shape, -1, device=loss_mask.device)
    row[mask] = torch.arange(int(mask.sum()), device=loss_mask.device)
    draft_ids = torch.full((head.config.vocab,), -1, device=loss_mask.device)
    draft_ids[head.draft_ids] = torch.arange(len(head.draft_ids), device=loss_mask.device)
    target = capture.distribution(states.final_hidden[mask], head.draft_ids)
    return PositionTargets(target, row, states.batch.tokens, draft_ids)


def mean_weight(targets: PositionTargets) -> float:
    """Return the weight of one position that makes a sum over positions a mean."""
    return 1.0 / max(1, len(targets.target.argmax))


class DistillObjective(HeadObjective[DistilledHead]):
    """Trains a small draft model to match the target's next-token distribution at every answer position.

    Draft tokens are accepted only along the target's own output, so the model trains on the target's answers.
    """

    def __init__(
        self, head: DistilledHead, capture: HiddenStateCapture, steps: int, loss_weights: LossWeights = LK
    ) -> None:
        super().__init__(head, capture)
        self.steps, self.loss_weights = steps, loss_weights
        layer = head.config.layer
        self.attend = CausalAttention(layer.scale, [layer.window] * head.config.layers)

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens, head = states.batch.tokens, self.head
        targets = position_targets(self.capture, states, head)
        positions = torch.arange(1, tokens.shape[1], device=tokens.device)  # serving skips position 0 as well
        hidden = head.fuse(states.hidden_states)[:, :-1]
        output = head.step(tokens[:, 1:], hidden, head.rope_rows(positions), self.attend)
        output = rms_norm(output, head.norm.weight, head.config.layer.norm_eps)
        mask = torch.zeros_like(states.batch.loss_mask[:, 1:])
        mask[:, :-1] = states.batch.loss_mask[:, 2:]
        row, column = mask.nonzero(as_tuple=True)
        rows = targets.at(row, column + 1, mean_weight(targets))
        scored = chunked_loss(output[row, column], self.output, rows, self.loss_weights)
        matches = torch.zeros_like(mask)
        matches[row, column] = targets.matches(row, column + 1, scored)
        return ObjectiveResult(scored.loss, _windows(matches, self.steps), _windows(mask, self.steps))


def _windows(x: Tensor, steps: int) -> Tensor:
    """Return sliding windows, [rows, positions] -> [rows, positions, steps]: each position with those after it."""
    return nn.functional.pad(x, (0, steps - 1)).unfold(1, steps, 1)
