# mypy: ignore-errors
"""A head's next token, found and noted where its logits are: the likeliest, or the one that wins its text's race."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .sample import exponential, first_of_largest, largest

BLOCK = 4096


@triton.jit
def _total(scores, count, peak, heat, BLOCK: tl.constexpr):
    """What all scores weigh against the largest."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < count, other=float("-inf")).to(tl.float32)
        total += tl.exp(x / heat - peak / heat)
    return tl.sum(total, 0)


@triton.jit
def _race(scores, ids, count, peak, heat, total, key, probs, BLOCK: tl.constexpr):
    """Who wins; what each was drawn with is left in `probs`."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    place = i
    for begin in range(0, count, BLOCK):
        real = begin + i < count
        x = tl.load(scores + begin + i, mask=real, other=float("-inf")).to(tl.float32)
        prob = tl.exp(x / heat - peak / heat) / total
        tl.store(probs + begin + i, prob, mask=real)
        speed = tl.div_rn(prob, exponential(key, tl.load(ids + begin + i, mask=real, other=0)))
        speed = tl.where(real, speed, -1.0)
        place = tl.where(speed > best, begin + i, place)
        best = tl.maximum(best, speed)
    _, winner = first_of_largest(best, place)
    return winner


@triton.jit
def _one_hot(probs, count, only, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        tl.store(probs + begin + i, (begin + i == only).to(tl.float32), mask=begin + i < count)


@triton.jit(do_not_specialize=["key_stride"], do_not_specialize_on_alignment=["tokens", "told", "sure", "keys"])
def _guess(
    logits, ids, heats, keys, tokens, told, sure, probs, stride, key_stride, count,
    DRAWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One text."""
    text = tl.program_id(0)
    scores = logits + text.to(tl.int64) * stride
    peak, at = largest(scores, count, BLOCK)
    heat = tl.full((), 0.0, tl.float32)
    if DRAWS:
        heat = tl.load(heats + text)
    warmth = tl.where(heat > 0, tl.maximum(heat, 1e-6), 1.0)
    total = _total(scores, count, peak, warmth, BLOCK)
    share = 1.0 / total
    if DRAWS:
        own = probs + text.to(tl.int64) * count
        if heat > 0:
            key = tl.load(keys + text * key_stride).to(tl.uint64, bitcast=True)
            at = _race(scores, ids, count, peak, warmth, total, key, own, BLOCK)
            x = tl.load(scores + at).to(tl.float32)
            share = tl.exp(x / warmth - peak / warmth) / total
        else:
            _one_hot(own, count, at, BLOCK)
    token = tl.load(ids + at)
    tl.store(tokens + text, token)
    tl.store(told + text, token.to(tl.float32))
    tl.store(sure + text, share)


@dataclass(frozen=True)
class Draw:
    """What each text draws with: `heats` [texts], 0 where it does not, and `keys` [texts] of noise; `probs` [texts,
    outputs] take what was drawn from."""

    heats: Tensor
    keys: Tensor
    probs: Tensor


def guess(logits: Tensor, ids: Tensor, draw: Draw | None, tokens: Tensor, told: Tensor) -> None:
    """Of logits [texts, outputs] a token each, by `ids`, to `tokens` [texts]; that and its share to `flush` [2, texts].

    Where nothing is drawn it is the likeliest, of equals the first.
    """
    texts, count = logits.shape
    block = max(64, min(BLOCK, triton.next_power_of_2(count)))
    heats, keys, probs = (told, ids, told) if draw is None else (draw.heats, draw.keys, draw.probs)
    _guess[(texts,)](
        logits, ids, heats, keys, tokens, told[0], told[1], probs, logits.stride(0), keys.stride(0), count,
        DRAWS=draw is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
