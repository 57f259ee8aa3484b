"""What trains one kind of drafter: what it makes of a batch of the target's states."""

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
    """One batch's result: the loss to descend, and how far a chain of guesses would have come."""

    loss: Tensor
    matches: Tensor  # [rows, places, steps]: whether each guess is the target's likeliest token
    mask: Tensor  # [rows, places, steps]: whether that place is one to guess

    def acceptance_counts(self) -> Tensor:
        """[2, steps]: guesses that stand together with all before them, and places where there could be one."""
        alive = (self.matches & self.mask).cumprod(-1)
        return torch.stack([alive.sum((0, 1)), self.mask.cumprod(-1).sum((0, 1))]).double()

    def simulate_decoding(self) -> tuple[int, int]:
        """Tokens and steps, were each text written with these guesses: a step begins where the last one ended.

        Guesses right after a wrong one are worse than others, so this is less than the mean over all places.
        """
        runs = (self.matches & self.mask).cumprod(-1).sum(-1).tolist()
        tokens = steps = 0
        for row, counted in zip(runs, self.mask[..., 0].tolist(), strict=True):
            if not any(counted):
                continue
            place, stop = counted.index(True) + 1, len(counted) - counted[::-1].index(True)
            tokens, steps = tokens + 1, steps + 1  # the prompt's own step, which has no guesses
            while place < stop:
                taken = min(row[place] + 1, stop - place)
                tokens, steps, place = tokens + taken, steps + 1, place + taken
        return tokens, steps


class Objective(ABC):
    """A drafter in training."""

    hidden_layers: tuple[int, ...] = ()

    @abstractmethod
    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult: ...

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """What is changed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """What training has made of it, to go on from."""

    @abstractmethod
    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """The drafter as it is served."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        mine = self.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                mine[name].copy_(tensor)


AnyHead = TypeVar("AnyHead", bound=DraftHead[Any])


class HeadObjective(Objective, Generic[AnyHead]):
    """The head that is trained is the one that is served."""

    def __init__(self, head: AnyHead, capture: HiddenStateCapture) -> None:
        self.head, self.capture, self.hidden_layers = head, capture, head.config.taps

    def parameters(self) -> list[nn.Parameter]:
        return self.head.trained()

    def state_dict(self) -> dict[str, Tensor]:
        return self.head.own_state()

    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        config = self.head.config
        self.head.config = replace(config, accuracy=accuracy)
        write_head(self.head, folder)
        self.head.config = config

    @property
    def output(self) -> Tensor:
        """The rows that make scores of its states."""
        assert self.head.output.weight is not None, "a head in training has its weights"
        return self.head.output.weight


@dataclass(frozen=True)
class PositionTargets:
    """What the target says after every place behind which there is a token to guess, found by place."""

    target: TargetDistribution
    row: Tensor  # [rows, length]: the goal's row for a place, -1 where there is none
    tokens: Tensor  # [rows, length]
    draft_ids: Tensor  # [vocab]: the head's id of each token, -1 where it has none

    def at(self, row: Tensor, place: Tensor, weight: float | Tensor) -> LossRows:
        """The target's word on the token behind these places."""
        which = self.row[row, place]
        label = self.draft_ids[self.tokens[row, place + 1]]
        given = torch.full(which.shape, weight, device=which.device) if isinstance(weight, float) else weight
        return LossRows(self.target.probs, which, label, given)

    def matches(self, row: Tensor, place: Tensor, scored: LossOutput) -> Tensor:
        """Whether guesses of the token behind these places are the target's likeliest."""
        return scored.argmax == self.target.draft_argmax[self.row[row, place]]


def position_targets(capture: HiddenStateCapture, states: TargetStates, head: DraftHead[Any]) -> PositionTargets:
    """Worked out once a batch: every step of every method reads the same rows."""
    learnt = states.batch.loss_mask
    wanted = torch.zeros_like(learnt)
    wanted[:, :-1] = learnt[:, 1:]
    row = torch.full(learnt.shape, -1, device=learnt.device)
    row[wanted] = torch.arange(int(wanted.sum()), device=learnt.device)
    draft = torch.full((head.config.vocab,), -1, device=learnt.device)
    draft[head.draft_ids] = torch.arange(len(head.draft_ids), device=learnt.device)
    return PositionTargets(
        capture.distribution(states.final_hidden[wanted], head.draft_ids), row, states.batch.tokens, draft
    )


def mean_weight(goals: PositionTargets) -> float:
    """What one place weighs, so that a loss is a mean over places."""
    return 1.0 / max(1, len(goals.target.argmax))


class DistillObjective(HeadObjective[DistilledHead]):
    """What is guessed stands only where the text so far is the target's: on its texts the draft has to be good."""

    def __init__(self, head: DistilledHead, capture: HiddenStateCapture, steps: int, mix: LossWeights = LK) -> None:
        super().__init__(head, capture)
        self.steps, self.mix = steps, mix
        layer = head.config.layer
        self.attend = CausalAttention(layer.scale, [layer.window] * head.config.layers)

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens, head = states.batch.tokens, self.head
        goals = position_targets(self.capture, states, head)
        places = torch.arange(1, tokens.shape[1], device=tokens.device)  # as it is served: place 0 is not read
        said = head.step(tokens[:, 1:], head.fuse(states.hidden_states)[:, :-1], head.turn(places), self.attend)
        said = rms_norm(said, head.norm.weight, head.config.layer.norm_eps)
        wanted = torch.zeros_like(states.batch.loss_mask[:, 1:])
        wanted[:, :-1] = states.batch.loss_mask[:, 2:]
        row, column = wanted.nonzero(as_tuple=True)
        rows = goals.at(row, column + 1, mean_weight(goals))
        scored = chunked_loss(said[row, column], self.output, rows, self.mix)
        hit = torch.zeros_like(wanted)
        hit[row, column] = goals.matches(row, column + 1, scored)
        return ObjectiveResult(scored.loss, _runs(hit, self.steps), _runs(wanted, self.steps))


def _runs(x: torch.Tensor, steps: int) -> torch.Tensor:
    """[rows, places] -> [rows, places, steps]: each place with those behind it."""
    return nn.functional.pad(x, (0, steps - 1)).unfold(1, steps, 1)
