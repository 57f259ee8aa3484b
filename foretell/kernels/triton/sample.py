# mypy: ignore-errors
"""One token a row, drawn as `sampling.sampling.sample` defines it: nothing is sorted, and no logits leave the device.

What stays in a draw is what lies above an edge: min-p's is known, top-k's is found digit by digit, and top-p's need not
be known. A token wins the race among all; if more than top-p's share of the mass lies above it, it is beyond the edge,
and so is all that is less likely: these leave, and the rest race again with the same noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
DIGITS = 16  # values of a digit that are tried at once in the search for the k-th largest
NEXT_TO_NOTHING: tl.constexpr = tl.constexpr(1e-300)
FIELDS = 3  # of a row's settings, in words of 64 bits: noise key; temperature and top-p; min-p and top-k


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x <= 0 in float32, to the last bit or two; the device's own is too coarse near 0."""
    whole = 1.0 + x
    near = x > -0.29289323
    shifted = whole.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    power = tl.where(near, 0, (shifted >> 23) - 127)
    rest = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    f = tl.where(near, x, rest)
    lost = tl.where(near, 0.0, (x - (whole - 1.0)) / whole)
    half = 0.5 * f * f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    series = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    k = power.to(tl.float32)
    return s * (half + series) + (k * 9.0580006145e-06 + lost) - half + f + k * 6.9313812256e-01


@triton.jit
def exponential(key, lane):
    """The noise of a token, as `sampling.noise.exponential` has it; `key` is what seed, position and stream make."""
    x = key + lane.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) & 0xFFFFFFFFFFFFF
    part = (x.to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16
    return -_log1p(-tl.minimum(part, 1 - 5.960464477539063e-08))


@triton.jit
def first_of_largest(best, place):
    """Of the best by lane, and where each was found, the largest and the first place that has it."""
    high = tl.max(best, 0)
    return high, tl.min(tl.where(best == high, place, 2147483647), 0)


@triton.jit
def largest(scores, vocab, BLOCK: tl.constexpr):
    """The largest score of a row and the first token that has it."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        place = tl.where(x > best, begin + i, place)
        best = tl.maximum(best, x)
    return first_of_largest(best, place)


@triton.jit
def _ordered(x):
    """Whole numbers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits ^ -2147483648, ~bits).to(tl.uint32, bitcast=True)


@triton.jit
def _edge(scores, vocab, count, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """The `count`-th largest score, or a bound that lets in as many: digit by digit, the highest first."""
    i = tl.arange(0, BLOCK)
    digit = tl.arange(0, DIGITS)
    edge = tl.full((), 0, tl.uint32)
    shift = tl.full((), 28, tl.int32)
    above = tl.full((), -1, tl.int32)
    while (shift >= 0) & (above != count):
        tried = edge + (digit.to(tl.uint32) << shift.to(tl.uint32))
        reached = tl.zeros([BLOCK, DIGITS], tl.int32)
        for begin in range(0, vocab, BLOCK):
            inside = begin + i < vocab
            x = tl.load(scores + begin + i, mask=inside, other=float("-inf")).to(tl.float32)
            number = tl.where(inside, _ordered(x), 0)  # below all that is tried but the first
            reached += (number[:, None] >= tried[None, :]).to(tl.int32)
        counts = tl.sum(reached, 0)
        best = tl.max(tl.where(counts >= count, digit, 0), 0)
        above = tl.sum(tl.where(digit == best, counts, 0), 0)
        edge += best.to(tl.uint32) << shift.to(tl.uint32)
        shift -= 4
    bits = edge.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _mass(scores, vocab, peak, warmth, edge, least, beyond, BLOCK: tl.constexpr):
    """What the tokens weigh that stay and are likelier than `beyond`."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - peak) / warmth)
        stays = (x >= edge) & (weight >= least) & (x > beyond)
        total += tl.where(stays, weight, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _race(scores, vocab, key, peak, warmth, edge, least, beyond, BLOCK: tl.constexpr, SKIPS: tl.constexpr):
    """Who wins among the tokens that stay and are likelier than `beyond`."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    place = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - peak) / warmth)
        stays = (x >= edge) & (weight >= least) & (x > beyond)
        some = True
        if SKIPS:  # most blocks have nobody left after a first race
            some = tl.max(stays.to(tl.int32), 0) > 0
        if some:
            speed = tl.where(stays, tl.div_rn(weight, exponential(key, begin + i)), -1.0)
            place = tl.where(speed > best, begin + i, place)
            best = tl.maximum(best, speed)
    _, token = first_of_largest(best, place)
    return token


@triton.jit
def drawn(scores, vocab, peak, words, settings, row, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """The token that wins the race of a row whose temperature is above 0; `peak` is its largest score."""
    key = tl.load(words + row * 3).to(tl.uint64, bitcast=True)
    warmth = tl.load(settings + row * 6 + 2)
    share = tl.load(settings + row * 6 + 3)
    least = tl.load(settings + row * 6 + 4)
    count = tl.load(settings + row * 6 + 5).to(tl.int32)
    edge = tl.full((), float("-inf"), tl.float32)
    if (count > 0) & (count < vocab):
        edge = _edge(scores, vocab, count, BLOCK // 4, DIGITS)
    beyond = tl.full((), float("-inf"), tl.float32)
    token = _race(scores, vocab, key, peak, warmth, edge, least, beyond, BLOCK, False)
    if share < 1:
        goal = share.to(tl.float64) * _mass(scores, vocab, peak, warmth, edge, least, beyond, BLOCK)
        goal = tl.maximum(goal, NEXT_TO_NOTHING)  # nothing at all is above the likeliest, and no share is as small
        beyond = tl.load(scores + token).to(tl.float32)
        while _mass(scores, vocab, peak, warmth, edge, least, beyond, BLOCK) >= goal:
            token = _race(scores, vocab, key, peak, warmth, edge, least, beyond, BLOCK, True)
            beyond = tl.load(scores + token).to(tl.float32)
    return token


@triton.jit
def _choose(logits, words, settings, tokens, stride, vocab, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    scores = logits + row.to(tl.int64) * stride
    peak, token = largest(scores, vocab, BLOCK)
    if tl.load(settings + row * 6 + 2) > 0:
        token = drawn(scores, vocab, peak, words, settings, row, BLOCK, DIGITS)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))


def choose_tokens(logits: Tensor, settings: Tensor, tokens: Tensor) -> None:
    """Of each row of logits [rows, vocab] one token, to `tokens` [rows], whole numbers of any size.

    `settings` [rows, FIELDS] are words of 64 bits, on the logits' device: the noise's key, then two floats each of
    temperature and top-p, min-p and top-k. At temperature 0 the likeliest token is taken, of equals the first.
    """
    rows, vocab = logits.shape
    floats = settings.view(torch.float32)
    warps = 16 if vocab > BLOCK else 4
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _choose[(rows,)](
        logits, settings, floats, tokens, logits.stride(0), vocab, BLOCK=max(64, block), DIGITS=DIGITS, num_warps=warps
    )
