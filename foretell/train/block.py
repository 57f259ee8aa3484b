"""Training objective of block heads (DSpark): a block of draft tokens in parallel, from many anchors of a document."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from foretell.models.draft_heads import BlockHead

from .capture import HiddenStateCapture, TargetStates
from .dense_forward import repeat_kv
from .losses import LK, LossRows, LossWeights, chunked_loss, confidence_loss
from .objective import HeadObjective, ObjectiveResult, position_targets

WEIGHT_SCALE = 4.0  # positions in a block over which a draft token's loss weight falls to 1/e
TOKENS_PER_ANCHOR = 3  # one anchor for this many tokens of a row


class BlockObjective(HeadObjective[BlockHead]):
    """Drafts a block after each anchor. Training samples anchors per batch; evaluation uses every position."""

    def __init__(self, head: BlockHead, capture: HiddenStateCapture, loss_weights: LossWeights = LK) -> None:
        super().__init__(head, capture)
        self.loss_weights = loss_weights

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens, loss_mask, head = states.batch.tokens, states.batch.loss_mask, self.head
        targets = position_targets(self.capture, states, head)
        anchors, valid = sample_anchors(loss_mask, generator) if torch.is_grad_enabled() else all_anchors(loss_mask)
        context = torch.arange(tokens.shape[1], device=tokens.device)
        kv = head.context_kv(head.fuse(head.with_token_hints(states.hidden_states, tokens)), head.rope_rows(context))
        positions = anchors[..., None] + torch.arange(head.config.block, device=tokens.device)
        attend = BlockAttention(head.config.layer.scale, head.config.causal_in_block, kv, anchors)
        hidden = head.draft_states(head(tokens.gather(1, anchors), head.rope_rows(positions), attend))
        mask = _block_mask(loss_mask, anchors, valid, head.config.drafts)
        row, anchor, step = mask.nonzero(as_tuple=True)
        position = anchors[row, anchor] + step
        weight = torch.exp(-step / WEIGHT_SCALE) / max(1, int(mask[..., 0].sum()))
        rows, previous = targets.at(row, position, weight), tokens[row, position]
        loss, argmax = self._loss(hidden[row, anchor, step], previous, rows)
        matches = torch.zeros_like(mask)
        matches[row, anchor, step] = argmax == targets.target.draft_argmax[targets.row[row, position]]
        return ObjectiveResult(loss, matches, mask)

    def _loss(self, hidden: Tensor, previous: Tensor, rows: LossRows) -> tuple[Tensor, Tensor]:
        """Return the loss of the logits, Markov bias included, plus that of the confidence head, and the argmax."""
        head = self.head
        bias_states = bias_weight = None
        if head.markov_in is not None and head.markov_out is not None:
            bias_states, bias_weight = nn.functional.embedding(previous, head.markov_in), head.markov_out.weight
        output = chunked_loss(hidden, self.output, rows, self.loss_weights, bias_states, bias_weight)
        loss = output.loss
        if head.surety is not None:
            confidence = head.confidence_logits(hidden.detach(), previous)
            loss = loss + confidence_loss(confidence, output.acceptance, rows.weights)
        return loss, output.argmax


def sample_anchors(loss_mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample anchors [rows, n] before answer tokens, and whether each is valid: short answers have fewer than n."""
    rows, length = loss_mask.shape
    count = max(1, math.ceil(length / TOKENS_PER_ANCHOR))
    rank = torch.rand(rows, length, generator=generator, device=generator.device).to(loss_mask.device)
    usable = torch.zeros_like(loss_mask)
    usable[:, 1:-1] = loss_mask[:, 2:]  # position 0 has no context before it
    rank = rank.masked_fill(~usable, -1.0)
    best, anchors = rank.topk(min(count, length), dim=1)
    return anchors, best >= 0


def all_anchors(loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return all positions in order as anchors, and whether each precedes an answer token."""
    valid = torch.zeros_like(loss_mask)
    valid[:, 1:-1] = loss_mask[:, 2:]
    return torch.arange(loss_mask.shape[1], device=loss_mask.device).expand_as(loss_mask), valid


def _block_mask(loss_mask: Tensor, anchors: Tensor, valid: Tensor, drafts: int) -> Tensor:
    """Return [rows, anchors, drafts]: the loss covers the position of this draft token."""
    positions = anchors[..., None] + torch.arange(1, drafts + 1, device=anchors.device)
    inside = positions < loss_mask.shape[1]
    rows = torch.arange(len(loss_mask), device=anchors.device)[:, None, None]
    return loss_mask[rows, positions.clamp_max(loss_mask.shape[1] - 1)] & inside & valid[..., None]


class BlockAttention:
    """Attention of block positions over the context before their anchor and over their own block."""

    def __init__(self, scale: float, causal: bool, kv: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.scale, self.causal, self.kv = scale, causal, kv
        length = kv[0][0].shape[1]
        position = torch.arange(length, device=anchors.device)
        self.masked = position >= anchors[..., None]  # [rows, anchors, length]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, count, block, heads, dim = q.shape
        groups = heads // k.shape[-2]
        # [rows, heads, length, dim]
        keys, values = (repeat_kv(each, groups).transpose(1, 2) for each in self.kv[layer])
        q = q.permute(0, 3, 1, 2, 4)  # [rows, heads, anchors, block, dim]
        k, v = (repeat_kv(each, groups).permute(0, 3, 1, 2, 4) for each in (k, v))
        lowest = torch.finfo(q.dtype).min
        context = (q.flatten(2, 3) @ keys.mT * self.scale).view(rows, heads, count, block, -1)
        context = context.masked_fill(self.masked[:, None, :, None], lowest)
        own = q @ k.mT * self.scale
        if self.causal:
            own = own.masked_fill(torch.ones(block, block, device=q.device).triu(1).bool(), lowest)
        probs = torch.cat([context, own], -1).softmax(-1)
        output = (probs[..., :-block].flatten(2, 3) @ values).view_as(q) + probs[..., -block:] @ v
        return output.permute(0, 2, 3, 1, 4)
