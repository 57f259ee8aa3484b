"""What trains one kind of drafter: what it makes of a batch of the target's states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from foretell.models.draft_heads import DraftHead, write_head

from .capture import Capture, Goal, States
from .losses import Rows, Scored


@dataclass(frozen=True)
class Progress:
    """One batch's result: the loss to descend, and how far a chain of guesses would have come."""

    loss: Tensor
    hits: Tensor  # [rows, places, steps]: whether each guess is the target's likeliest token
    counted: Tensor  # [rows, places, steps]: whether that place is one to guess

    def sums(self) -> Tensor:
        """[2, steps]: guesses that stand together with all before them, and places where there could be one."""
        alive = (self.hits & self.counted).cumprod(-1)
        return torch.stack([alive.sum((0, 1)), self.counted.cumprod(-1).sum((0, 1))]).double()

    def walk(self) -> tuple[int, int]:
        """Tokens and steps, were each text written with these guesses: a step begins where the last one ended.

        Guesses right after a wrong one are worse than others, so this is less than the mean over all places.
        """
        runs = (self.hits & self.counted).cumprod(-1).sum(-1).tolist()
        tokens = steps = 0
        for row, counted in zip(runs, self.counted[..., 0].tolist(), strict=True):
            if not any(counted):
                continue
            place, stop = counted.index(True) + 1, len(counted) - counted[::-1].index(True)
            tokens, steps = tokens + 1, steps + 1  # the prompt's own step, which has no guesses
            while place < stop:
                taken = min(row[place] + 1, stop - place)
                tokens, steps, place = tokens + taken, steps + 1, place + taken
        return tokens, steps


class Method(ABC):
    """A drafter in training."""

    taps: tuple[int, ...] = ()

    @abstractmethod
    def __call__(self, states: States, generator: torch.Generator) -> Progress: ...

    @abstractmethod
    def trained(self) -> list[nn.Parameter]:
        """What is changed."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What training has made of it, to go on from."""

    @abstractmethod
    def write(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """The drafter as it is served."""

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        mine = self.state()
        with torch.no_grad():
            for name, tensor in state.items():
                mine[name].copy_(tensor)


AnyHead = TypeVar("AnyHead", bound=DraftHead[Any])


class HeadMethod(Method, Generic[AnyHead]):
    """The head that is trained is the one that is served."""

    def __init__(self, head: AnyHead, capture: Capture) -> None:
        self.head, self.capture, self.taps = head, capture, head.config.hidden_layers

    def trained(self) -> list[nn.Parameter]:
        return self.head.trainable_parameters()

    def state(self) -> dict[str, Tensor]:
        return self.head.own_state_dict()

    def write(self, folder: Path, accuracy: tuple[float, ...]) -> None:
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
class Goals:
    """What the target says after every place behind which there is a token to guess, found by place."""

    goal: Goal
    row: Tensor  # [rows, length]: the goal's row for a place, -1 where there is none
    tokens: Tensor  # [rows, length]
    draft: Tensor  # [vocab]: the head's id of each token, -1 where it has none

    def at(self, row: Tensor, place: Tensor, weight: float | Tensor) -> Rows:
        """The target's word on the token behind these places."""
        which = self.row[row, place]
        label = self.draft[self.tokens[row, place + 1]]
        given = torch.full(which.shape, weight, device=which.device) if isinstance(weight, float) else weight
        return Rows(self.goal.probs, which, label, given)

    def hits(self, row: Tensor, place: Tensor, scored: Scored) -> Tensor:
        """Whether guesses of the token behind these places are the target's likeliest."""
        return scored.guess == self.goal.best_draft[self.row[row, place]]


def goals_of(capture: Capture, states: States, head: DraftHead[Any]) -> Goals:
    """Worked out once a batch: every step of every method reads the same rows."""
    learnt = states.batch.learnt
    wanted = torch.zeros_like(learnt)
    wanted[:, :-1] = learnt[:, 1:]
    row = torch.full(learnt.shape, -1, device=learnt.device)
    row[wanted] = torch.arange(int(wanted.sum()), device=learnt.device)
    draft = torch.full((head.config.vocab,), -1, device=learnt.device)
    draft[head.draft_ids] = torch.arange(len(head.draft_ids), device=learnt.device)
    return Goals(capture.goal(states.last[wanted], head.draft_ids), row, states.batch.tokens, draft)


def mean_weight(goals: Goals) -> float:
    """What one place weighs, so that a loss is a mean over places."""
    return 1.0 / max(1, len(goals.goal.best))
