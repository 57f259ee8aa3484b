"""Training a block head: from many places of a text at once, each time a whole block."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from foretell.models.draft_heads import BlockHead

from .capture import Capture, States
from .dense_forward import spread
from .losses import LK, Mix, Rows, rows_loss, surety_loss
from .objective import HeadMethod, Progress, goals_of

FADE = 4.0  # places over which a guess's weight falls to a third
SPACING = 3  # tokens of a row for each anchor


class BlockMethod(HeadMethod[BlockHead]):
    """Anchors are drawn anew for every batch."""

    def __init__(self, head: BlockHead, capture: Capture, mix: Mix = LK) -> None:
        super().__init__(head, capture)
        self.mix = mix

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        tokens, learnt, head = states.batch.tokens, states.batch.learnt, self.head
        goals = goals_of(self.capture, states, head)
        anchors, real = draw_anchors(learnt, generator) if torch.is_grad_enabled() else every_anchor(learnt)
        everywhere = torch.arange(tokens.shape[1], device=tokens.device)
        read = head.context_kv(head.fuse(head.with_token_hints(states.features, tokens)), head.rope_rows(everywhere))
        places = anchors[..., None] + torch.arange(head.config.block, device=tokens.device)
        attend = BlockAttend(head.config.layer.scale, head.config.causal_in_block, read, anchors)
        said = head.draft_states(head(tokens.gather(1, anchors), head.rope_rows(places), attend))
        wanted = _wanted(learnt, anchors, real, head.config.drafts)
        row, anchor, step = wanted.nonzero(as_tuple=True)
        place = anchors[row, anchor] + step
        weight = torch.exp(-step / FADE) / max(1, int(wanted[..., 0].sum()))
        rows, before = goals.at(row, place, weight), tokens[row, place]
        loss, alpha, guess = self._score(said[row, anchor, step], before, rows)
        hits = torch.zeros_like(wanted)
        hits[row, anchor, step] = guess == goals.goal.best_draft[goals.row[row, place]]
        return Progress(loss, hits, wanted)

    def _score(self, states: Tensor, before: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        head = self.head
        hints = nudge = None
        if head.markov_in is not None and head.markov_out is not None:
            hints, nudge = nn.functional.embedding(before, head.markov_in), head.markov_out.weight
        scored = rows_loss(states, self.output, rows, self.mix, hints, nudge)
        loss = scored.loss
        if head.surety is not None:
            loss = loss + surety_loss(head.confidence_logits(states.detach(), before), scored.alpha, rows.weight)
        return loss, scored.alpha, scored.guess


def draw_anchors(learnt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Places behind which a guess is wanted, [rows, anchors], and whether there is one: short answers have fewer."""
    rows, length = learnt.shape
    count = max(1, math.ceil(length / SPACING))
    rank = torch.rand(rows, length, generator=generator, device=generator.device).to(learnt.device)
    usable = torch.zeros_like(learnt)
    usable[:, 1:-1] = learnt[:, 2:]  # place 0 has nothing read before it
    rank = rank.masked_fill(~usable, -1.0)
    found, anchors = rank.topk(min(count, length), dim=1)
    return anchors, found >= 0


def every_anchor(learnt: Tensor) -> tuple[Tensor, Tensor]:
    """All places in their order, to measure with; those behind which nothing is to be guessed are not real."""
    real = torch.zeros_like(learnt)
    real[:, 1:-1] = learnt[:, 2:]
    return torch.arange(learnt.shape[1], device=learnt.device).expand_as(learnt), real


def _wanted(learnt: Tensor, anchors: Tensor, real: Tensor, drafts: int) -> Tensor:
    """[rows, anchors, drafts]: whether the place of each guess is one to learn."""
    places = anchors[..., None] + torch.arange(1, drafts + 1, device=anchors.device)
    inside = places < learnt.shape[1]
    rows = torch.arange(len(learnt), device=anchors.device)[:, None, None]
    return learnt[rows, places.clamp_max(learnt.shape[1] - 1)] & inside & real[..., None]


class BlockAttend:
    """Rows of a block see what was read before their anchor, and their block."""

    def __init__(self, scale: float, causal: bool, read: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.scale, self.causal, self.read = scale, causal, read
        length = read[0][0].shape[1]
        place = torch.arange(length, device=anchors.device)
        self.hidden = place >= anchors[..., None]  # [rows, anchors, length]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, count, block, heads, dim = q.shape
        share = heads // k.shape[-2]
        keys, values = (spread(each, share).transpose(1, 2) for each in self.read[layer])  # [rows, heads, length, dim]
        q = q.permute(0, 3, 1, 2, 4)  # [rows, heads, anchors, block, dim]
        k, v = (spread(each, share).permute(0, 3, 1, 2, 4) for each in (k, v))
        least = torch.finfo(q.dtype).min
        before = (q.flatten(2, 3) @ keys.mT * self.scale).view(rows, heads, count, block, -1)
        before = before.masked_fill(self.hidden[:, None, :, None], least)
        own = q @ k.mT * self.scale
        if self.causal:
            own = own.masked_fill(torch.ones(block, block, device=q.device).triu(1).bool(), least)
        shares = torch.cat([before, own], -1).softmax(-1)
        seen = (shares[..., :-block].flatten(2, 3) @ values).view_as(q) + shares[..., -block:] @ v
        return seen.permute(0, 2, 3, 1, 4)
