"""What a head guesses, found where its logits are: the likeliest tokens, or those that win a text's own race."""

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

TOKENS, PROBS, EXPANDED = range(3)  # what is told of each child of a tree
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class DraftOutput:
    """What comes back of a draft: `flush` in one transfer, by a `LandingRecorder`; `probs` stay where they are."""

    readback: Tensor  # of chains [tokens and how sure, depth, texts], in float32
    probs: Tensor | None = None  # [depth, texts, outputs]: what each was drawn from, where any was

    def unpadded(self, texts: int) -> DraftOutput:
        """Without those that only fill up, and never written over. `flush` has landed."""
        return DraftOutput(
            self.readback[:, :, :texts].clone(), None if self.probs is None else self.probs[:, :texts].clone()
        )

    @property
    def tokens(self) -> list[list[int]]:
        """By depth and text."""
        tokens: list[list[int]] = self.readback[0].long().tolist()
        return tokens

    @property
    def confidence(self) -> list[list[float]]:
        sure: list[list[float]] = self.readback[1].tolist()
        return sure


class ProbsBuffer:
    """Where drafts of all sizes leave what they drew from, one after the other: a graph that is kept keeps no room of
    its own. It grows to twice what it was, so that all that older graphs still use is no more than the newest."""

    def __init__(self, outputs: int, device: torch.device) -> None:
        self.outputs = outputs
        self._numbers = torch.empty(0, device=device)

    def __call__(self, sizes: DraftShape) -> Tensor | None:
        """To be asked before anything is recorded, which would have it from the graph's own memory."""
        if not sizes.sampled:
            return None
        count = sizes.depth * sizes.sequences * self.outputs
        if self._numbers.numel() < count:
            self._numbers = torch.empty(max(count, 2 * self._numbers.numel()), device=self._numbers.device)
        return self._numbers[:count].view(sizes.depth, sizes.sequences, self.outputs)


@dataclass(frozen=True)
class TreeCandidates:
    """What was looked at of some trees, by depth and text: for each followed node its likeliest children."""

    tokens: npt.NDArray[np.int64]  # [depth, texts, followed, children]
    probs: npt.NDArray[np.float32]  # how likely each is there
    expanded: npt.NDArray[
        np.int64
    ]  # [depth, texts, followed]: which children the next depth's are, all counted through

    @classmethod
    def from_readback(cls, found: Tensor) -> TreeCandidates:
        """Of [depth, what is told, texts, followed, children], on the host; it may be written over after this."""
        numbers = found.numpy()
        tokens, followed = numbers[:, TOKENS].astype(np.int64), numbers[:, EXPANDED, :, :, 0].astype(np.int64)
        return cls(tokens, numbers[:, PROBS].copy(), followed)


class ExponentialRace:
    """Each text's own noise, where any draws."""

    def __init__(self, table: DraftTable, ids: Tensor) -> None:
        self.temperatures, self.noise_keys, self.ids = table.temperatures, table.noise_keys, ids
        self.is_sampled = self.temperatures > 0

    def probs(self, logits: Tensor) -> Tensor:
        """What is drawn from, [texts, rows, outputs]; `sampling.probabilities` defines it."""
        return (logits / self.temperatures.clamp_min(MIN_TEMPERATURE)[..., None]).softmax(-1)

    def noise(self, depth: int) -> Tensor:
        """[texts, outputs]."""
        return noise.exponential_of(self.noise_keys[:, depth], self.ids)


def sample_tokens(logits: Tensor, race: ExponentialRace, found: DraftOutput, depth: int) -> Tensor:
    """The tokens [texts] of logits [texts, outputs], noted with how sure each is; `drawing.draw_nodes` defines it."""
    best, at = logits.max(-1)
    sure = (best - logits.logsumexp(-1)).exp()
    if found.probs is not None:
        probs = race.probs(logits[:, None])[:, 0]
        drawn = (probs / race.noise(depth)).argmax(-1)
        draws = race.is_sampled[:, 0]
        sure = torch.where(draws, probs.gather(1, drawn[:, None])[:, 0], sure)
        only = torch.zeros_like(probs).scatter_(1, at[:, None], 1.0)
        found.probs[depth] = torch.where(race.is_sampled, probs, only)
        at = torch.where(draws, drawn, at)
    tokens = race.ids[at]
    found.readback[0, depth] = tokens
    found.readback[1, depth] = sure
    return tokens


def top_children(logits: Tensor, race: ExponentialRace, depth: int, drawn: bool, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best children of logits [texts, rows, outputs], and their shares; `choosing.Chooser` defines them."""
    if not drawn:
        best, at = logits.topk(count)
        return race.ids[at], (best - logits.logsumexp(-1, keepdim=True)).exp()
    ahead = race.probs(logits) / race.noise(depth)[:, None]
    odds = torch.where(race.is_sampled[..., None], ahead / ahead.sum(-1, keepdim=True), logits.softmax(-1))
    shares, at = odds.topk(count)
    return race.ids[at], shares


class TreeTopK:
    """Follows the likeliest branches of some trees level by level; `tree.LevelTree` keeps of them what it wants."""

    def __init__(self, table: DraftTable, ids: Tensor, children: int) -> None:
        sizes = table.shape
        self.table, self.race, self.shape, self.depth = table, ExponentialRace(table, ids), sizes, 0
        self.output = torch.zeros(sizes.depth, 3, sizes.sequences, sizes.width, children, device=table.device)
        # As the host multiplies shares, so that both find the same.
        self.path_probs = torch.ones(sizes.sequences, 1, dtype=torch.float64, device=table.device)
        self.tokens = self.child_probs = self.path_probs  # of all children of a level

    def add_level(self, logits: Tensor) -> None:
        """Note the likeliest children of each row of logits [texts * rows, outputs]."""
        (texts, rows), count = self.path_probs.shape, self.output.shape[-1]
        tokens, shares = top_children(logits.view(texts, rows, -1), self.race, self.depth, self.shape.sampled, count)
        self.output[self.depth, TOKENS, :, :rows] = tokens
        self.output[self.depth, PROBS, :, :rows] = shares
        self.tokens, self.child_probs = tokens.flatten(1), (self.path_probs[..., None] * shares).flatten(1)

    def expand(self) -> tuple[Tensor, Tensor]:
        """Follow the best children: their tokens, [texts * followed], and the rows they hang on, [texts, followed]."""
        wide, count = self.shape.width, self.output.shape[-1]
        # Of equals the first, as on the host: so it is a sort that leaves them in order.
        worth, best = self.child_probs.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(wide, device=best.device)
        # What is beyond a text's own width is not followed there, and must not crowd out what hangs on the others.
        worth = worth[:, :wide].masked_fill(rank >= self.table.field(WIDTH)[:, None], 0)
        chosen, order = best[:, :wide].sort(dim=1)  # a level stands in the order in which its nodes were found
        self.output[self.depth, EXPANDED, :, :, 0] = chosen
        self.path_probs = worth.gather(1, order)
        self.depth += 1
        return self.tokens.gather(1, chosen).flatten(), chosen // count


def gather_logits(head: DraftHead[Any], scores: Tensor, top: int) -> Tensor:
    """Logits over all tokens a head can guess, of scores [rows, outputs here]; ranks behind the first get theirs back.

    Where only the `top` likeliest are looked at, no others are sent: the rest is told as one number, and stands as if
    spread evenly, so that each of the likeliest has its logit and its share.
    """
    if head.ranks is None or head.shard is None:
        return scores
    widths = tuple(len(each.split(head.config.outputs)) for each in head.shard.all_ranks)
    if not 0 < top <= min(widths):
        return head.ranks.gather(scores, widths)
    best, at = scores.topk(top)
    mine = torch.cat([best, (at + head.local_outputs.start).float(), scores.logsumexp(-1, keepdim=True)], 1)
    every = head.ranks.gather(mine, (mine.shape[1],) * len(widths))
    if head.shard.rank:
        return scores
    return _spread_logits(every.view(len(scores), len(widths), -1), top, head.config.outputs)


def _spread_logits(told: Tensor, top: int, outputs: int) -> Tensor:
    """`flush` [rows, ranks, logits and tokens of the likeliest, and the sum of all]."""
    best, chosen = told[..., :top].flatten(1).topk(top)
    tokens = told[..., top:-1].flatten(1).gather(1, chosen).long()
    total = told[..., -1].logsumexp(-1, keepdim=True)
    rest = 1 - (best.logsumexp(-1, keepdim=True) - total).exp().clamp_max(1)
    each = total + rest.log() - math.log(max(1, outputs - top))
    return each.repeat(1, outputs).scatter_(1, tokens, best)
