"""Sampling of draft tokens where a head's logits are: argmax or sampled tokens of chains, top-k children of trees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.models.draft_heads import DraftHead
from foretell.runner.heads.tables import WIDTH, DraftShape, DraftTable
from foretell.sampling import noise

TOKENS, PROBS, EXPANDED = range(3)  # what is read back of each child of a tree
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class DraftOutput:
    """Output of a draft: `readback` goes to the host in one transfer, by a `ReadbackGraphCache`; `probs` stay."""

    readback: Tensor  # of chains [tokens and confidence, depth, sequences], as float32
    probs: Tensor | None = None  # [depth, sequences, outputs]: the distributions that tokens were sampled from

    def unpadded(self, sequences: int) -> DraftOutput:
        """Return a copy for the first `sequences` that the next draft does not overwrite; `readback` is on the host."""
        probs = None if self.probs is None else self.probs[:, :sequences].clone()
        return DraftOutput(self.readback[:, :, :sequences].clone(), probs)

    @property
    def tokens(self) -> list[list[int]]:
        """Return the draft tokens by depth and sequence."""
        tokens: list[list[int]] = self.readback[0].long().tolist()
        return tokens

    @property
    def confidence(self) -> list[list[float]]:
        """Return the confidence of each draft token, by depth and sequence."""
        confidence: list[list[float]] = self.readback[1].tolist()
        return confidence


class ProbsBuffer:
    """Buffer for the distributions of drafts of all shapes, so that no CUDA graph keeps a buffer of its own.

    It at least doubles when it grows, so all buffers that older graphs still use are no larger than the newest one.
    """

    def __init__(self, outputs: int, device: torch.device) -> None:
        self.outputs = outputs
        self._numbers = torch.empty(0, device=device)

    def __call__(self, shape: DraftShape) -> Tensor | None:
        """Return the buffer for a shape. Call it before a capture, which would allocate from the graph's memory."""
        if not shape.sampled:
            return None
        count = shape.depth * shape.sequences * self.outputs
        if self._numbers.numel() < count:
            self._numbers = torch.empty(max(count, 2 * self._numbers.numel()), device=self._numbers.device)
        return self._numbers[:count].view(shape.depth, shape.sequences, self.outputs)


@dataclass(frozen=True)
class TreeCandidates:
    """Top-k children of each expanded node, by depth and sequence."""

    tokens: npt.NDArray[np.int64]  # [depth, sequences, expanded, children]
    probs: npt.NDArray[np.float32]  # of each child given its parent
    expanded: npt.NDArray[np.int64]  # [depth, sequences, expanded]: flat indices of the children expanded next

    @classmethod
    def from_readback(cls, readback: Tensor) -> TreeCandidates:
        """Copy the readback of a tree, [depth, 3, sequences, expanded, children] on the host."""
        numbers = readback.numpy()
        tokens, expanded = numbers[:, TOKENS].astype(np.int64), numbers[:, EXPANDED, :, :, 0].astype(np.int64)
        return cls(tokens, numbers[:, PROBS].copy(), expanded)


class ExponentialRace:
    """Noise of each sequence: the token with the largest probability / exponential noise is a sample (Gumbel-max)."""

    def __init__(self, table: DraftTable, ids: Tensor) -> None:
        self.temperatures, self.noise_keys, self.ids = table.temperatures, table.noise_keys, ids
        self.is_sampled = self.temperatures > 0

    def probs(self, logits: Tensor) -> Tensor:
        """Return the distributions [sequences, rows, outputs], as `sampling.probabilities` defines them."""
        return (logits / self.temperatures.clamp_min(MIN_TEMPERATURE)[..., None]).softmax(-1)

    def noise(self, depth: int) -> Tensor:
        """Return exponential noise [sequences, outputs]."""
        return noise.exponential_of(self.noise_keys[:, depth], self.ids)


def sample_tokens(logits: Tensor, race: ExponentialRace, output: DraftOutput, depth: int) -> Tensor:
    """Return the tokens [sequences] of logits [sequences, outputs], and write them with their confidence to `output`.

    `draft.heads.sampling` defines them.
    """
    best, at = logits.max(-1)
    confidence = (best - logits.logsumexp(-1)).exp()
    if output.probs is not None:
        probs = race.probs(logits[:, None])[:, 0]
        sampled = (probs / race.noise(depth)).argmax(-1)
        is_sampled = race.is_sampled[:, 0]
        confidence = torch.where(is_sampled, probs.gather(1, sampled[:, None])[:, 0], confidence)
        one_hot = torch.zeros_like(probs).scatter_(1, at[:, None], 1.0)
        output.probs[depth] = torch.where(race.is_sampled, probs, one_hot)
        at = torch.where(is_sampled, sampled, at)
    tokens = race.ids[at]
    output.readback[0, depth] = tokens
    output.readback[1, depth] = confidence
    return tokens


def top_children(logits: Tensor, race: ExponentialRace, depth: int, sampled: bool, count: int) -> tuple[Tensor, Tensor]:
    """Return the top `count` children of logits [sequences, rows, outputs] and their probabilities.

    A sampling sequence ranks its children by the outcome of its race. `draft.heads.sampling` defines them.
    """
    if not sampled:
        best, at = logits.topk(count)
        return race.ids[at], (best - logits.logsumexp(-1, keepdim=True)).exp()
    scores = race.probs(logits) / race.noise(depth)[:, None]
    odds = torch.where(race.is_sampled[..., None], scores / scores.sum(-1, keepdim=True), logits.softmax(-1))
    probs, at = odds.topk(count)
    return race.ids[at], probs


class TreeTopK:
    """Expands the most likely branches of some trees level by level; `draft.heads.tree` prunes the result."""

    def __init__(self, table: DraftTable, ids: Tensor, children: int) -> None:
        shape = table.shape
        self.table, self.race, self.shape, self.depth = table, ExponentialRace(table, ids), shape, 0
        self.output = torch.zeros(shape.depth, 3, shape.sequences, shape.width, children, device=table.device)
        # float64, as on the host, so that both expand the same nodes.
        self.path_probs = torch.ones(shape.sequences, 1, dtype=torch.float64, device=table.device)
        self.tokens = self.child_probs = self.path_probs  # of all children of a level

    def add_level(self, logits: Tensor) -> None:
        """Write the top-k children of each row of logits [sequences * rows, outputs]."""
        (sequences, rows), count = self.path_probs.shape, self.output.shape[-1]
        tokens, probs = top_children(logits.view(sequences, rows, -1), self.race, self.depth, self.shape.sampled, count)
        self.output[self.depth, TOKENS, :, :rows] = tokens
        self.output[self.depth, PROBS, :, :rows] = probs
        self.tokens, self.child_probs = tokens.flatten(1), (self.path_probs[..., None] * probs).flatten(1)

    def expand(self) -> tuple[Tensor, Tensor]:
        """Choose the children to expand; return their tokens [sequences * width] and parent rows [sequences, width]."""
        width, count = self.shape.width, self.output.shape[-1]
        # A stable sort prefers the first of equal children, as the host does.
        ranked, best = self.child_probs.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(width, device=best.device)
        # Nodes beyond a sequence's own width get probability 0, so that their children displace no others.
        ranked = ranked[:, :width].masked_fill(rank >= self.table.field(WIDTH)[:, None], 0)
        chosen, order = best[:, :width].sort(dim=1)  # the nodes of a level keep the order in which they were found
        self.output[self.depth, EXPANDED, :, :, 0] = chosen
        self.path_probs = ranked.gather(1, order)
        self.depth += 1
        return self.tokens.gather(1, chosen).flatten(), chosen // count


def gather_logits(head: DraftHead[Any], logits: Tensor, top_k: int) -> Tensor:
    """Gather logits of local outputs [rows, local outputs] on the leader; the other ranks get their own back.

    With `top_k` only the top-k logits and the log-sum-exp of each rank are sent. The rest is spread evenly over the
    other tokens, so that each of the top-k has its exact logit and probability.
    """
    if head.ranks is None or head.shard is None:
        return logits
    widths = tuple(len(each.split(head.config.outputs)) for each in head.shard.all_ranks)
    if not 0 < top_k <= min(widths):
        return head.ranks.gather(logits, widths)
    best, at = logits.topk(top_k)
    mine = torch.cat([best, (at + head.local_outputs.start).float(), logits.logsumexp(-1, keepdim=True)], 1)
    every = head.ranks.gather(mine, (mine.shape[1],) * len(widths))
    if head.shard.rank:
        return logits
    return _spread_logits(every.view(len(logits), len(widths), -1), top_k, head.config.outputs)


def _spread_logits(gathered: Tensor, top_k: int, outputs: int) -> Tensor:
    """Return dense logits; `gathered` is [rows, ranks, top-k logits, top-k tokens, log-sum-exp]."""
    best, chosen = gathered[..., :top_k].flatten(1).topk(top_k)
    tokens = gathered[..., top_k:-1].flatten(1).gather(1, chosen).long()
    total = gathered[..., -1].logsumexp(-1, keepdim=True)
    rest = 1 - (best.logsumexp(-1, keepdim=True) - total).exp().clamp_max(1)
    each = total + rest.log() - math.log(max(1, outputs - top_k))
    return each.repeat(1, outputs).scatter_(1, tokens, best)
