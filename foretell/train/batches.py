"""Documents as rows of like length. A row needs no mask between documents then, and next to no padding."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .token_dataset import Document

JITTER = 0.15  # by how much lengths are mixed up before sorting: neighbours are of like length, and otherwise anybody


@dataclass(frozen=True)
class Batch:
    """Rows that end in padding."""

    tokens: Tensor  # [rows, length]
    learnt: Tensor  # [rows, length]: whether a place's token is one to guess

    @property
    def size(self) -> int:
        return self.tokens.numel()


class Batches:
    """The batch of any step, from (seed, step) alone: a run that was killed needs no more than its step's number."""

    def __init__(self, documents: list[Document], tokens: int, seed: int, device: torch.device) -> None:
        self.documents, self.tokens, self.seed, self.device = documents, tokens, seed, device
        # Every epoch has the same batches in another order, so that what the target says of one can be kept.
        self._cuts = self._cut(range(len(documents)), random.Random(f"{seed} 0"))
        self._epoch, self._order = 0, self._ordered(0)

    @property
    def an_epoch(self) -> int:
        """Steps of an epoch."""
        return len(self._cuts)

    def number(self, step: int) -> int:
        """Which of an epoch's batches a step has."""
        epoch = step // len(self._cuts)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._ordered(epoch)
        return self._order[step % len(self._cuts)]

    def at(self, step: int) -> Batch:
        """The batch of a step."""
        return self.of([self.documents[i] for i in self._cuts[self.number(step)]])

    def of(self, documents: list[Document]) -> Batch:
        """These documents side by side."""
        length = max(len(each.tokens) for each in documents)
        tokens = np.zeros((len(documents), length), np.int64)
        learnt = np.zeros((len(documents), length), bool)
        for row, each in enumerate(documents):
            tokens[row, : len(each.tokens)] = each.tokens
            learnt[row, : len(each.tokens)] = each.mask
        return Batch(torch.from_numpy(tokens).to(self.device), torch.from_numpy(learnt).to(self.device))

    def in_order(self) -> list[Batch]:
        """Every document once, in batches that do not change: to measure with."""
        return [self.of([self.documents[i] for i in rows]) for rows in self._cut(range(len(self.documents)), None)]

    def _ordered(self, epoch: int) -> list[int]:
        order = list(range(len(self._cuts)))
        random.Random(f"{self.seed} {epoch} order").shuffle(order)
        return order

    def _cut(self, which: range, rng: random.Random | None) -> list[list[int]]:
        """Neighbours by length, as many to a batch as its tokens allow."""

        def rank(i: int) -> float:
            return len(self.documents[i].tokens) * (1.0 if rng is None else rng.uniform(1 - JITTER, 1 + JITTER))

        plan: list[list[int]] = [[]]
        longest = 0
        for i in sorted(which, key=rank, reverse=True):
            longest = max(longest, len(self.documents[i].tokens))
            if plan[-1] and longest * (len(plan[-1]) + 1) > self.tokens:
                plan.append([])
                longest = len(self.documents[i].tokens)
            plan[-1].append(i)
        return plan
