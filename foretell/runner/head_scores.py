"""What the ranks of a head think of their tokens, put together at the first one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foretell.models.heads import Head


def all_scores(head: Head[Any], scores: Tensor, top: int) -> Tensor:
    """Logits over all tokens a head can guess, of scores [rows, outputs here]; ranks behind the first get theirs back.

    Where only the `top` likeliest are looked at, no others are sent: the rest is told as one number, and stands as if
    spread evenly, so that each of the likeliest has its logit and its share.
    """
    if head.ranks is None or head.shard is None:
        return scores
    widths = tuple(len(each.run(head.config.outputs)) for each in head.shard.others)
    if not 0 < top <= min(widths):
        return head.ranks.gather(scores, widths)
    best, at = scores.topk(top)
    mine = torch.cat([best, (at + head.outputs_here.start).float(), scores.logsumexp(-1, keepdim=True)], 1)
    every = head.ranks.gather(mine, (mine.shape[1],) * len(widths))
    if head.shard.rank:
        return scores
    return _spread(every.view(len(scores), len(widths), -1), top, head.config.outputs)


def _spread(told: Tensor, top: int, outputs: int) -> Tensor:
    """`told` [rows, ranks, logits and tokens of the likeliest, and the sum of all]."""
    best, chosen = told[..., :top].flatten(1).topk(top)
    tokens = told[..., top:-1].flatten(1).gather(1, chosen).long()
    total = told[..., -1].logsumexp(-1, keepdim=True)
    rest = 1 - (best.logsumexp(-1, keepdim=True) - total).exp().clamp_max(1)
    each = total + rest.log() - math.log(max(1, outputs - top))
    return each.repeat(1, outputs).scatter_(1, tokens, best)
