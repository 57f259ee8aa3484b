# mypy: ignore-errors
"""Token sampling as `sampling.sampling.sample` defines it, without sorting and without moving logits to the host.

min-p and top-k are thresholds on the logits; the one of top-k is found by a radix search. The threshold of top-p need
not be known: a token is sampled among all; if at least top-p of the mass is more likely than that token, it is outside
of the nucleus, so it and everything less likely is excluded and the race is repeated with the same noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits in registers at once
DIGITS = 16  # radix of the search for the k-th largest; all values of a digit are tried at once
SMALLEST_MASS: tl.constexpr = tl.constexpr(1e-300)
FIELDS = 3  # 64-bit words of a row's settings: noise key; temperature and top-p; min-p and top-k


@triton.jit
def _log1p(x):
    """Return log(1 + x) for -1 < x <= 0 in float32, accurate to 1-2 ulp; the device function is too coarse near 0."""
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
    """Return the noise of a token as `sampling.noise.exponential` does; `key` comes from `sampling.noise.keys`."""
    x = key + lane.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) & 0xFFFFFFFFFFFFF
    part = (x.to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16
    return -_log1p(-tl.minimum(part, 1 - 5.960464477539063e-08))


@triton.jit
def first_argmax(best, index):
    """Return the maximum over lanes and the lowest index that has it."""
    high = tl.max(best, 0)
    return high, tl.min(tl.where(best == high, index, 2147483647), 0)


@triton.jit
def argmax_row(scores, vocab, BLOCK: tl.constexpr):
    """Return the largest score of a row and the first token that has it."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        index = tl.where(x > best, begin + i, index)
        best = tl.maximum(best, x)
    return first_argmax(best, index)


@triton.jit
def _sortable_bits(x):
    """Map floats to unsigned integers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits ^ -2147483648, ~bits).to(tl.uint32, bitcast=True)


@triton.jit
def _kth_largest(scores, vocab, top_k, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """Return the k-th largest score, or a bound that admits as many, by a radix search from the highest digit."""
    i = tl.arange(0, BLOCK)
    digit = tl.arange(0, DIGITS)
    threshold = tl.full((), 0, tl.uint32)
    shift = tl.full((), 28, tl.int32)
    above = tl.full((), -1, tl.int32)
    while (shift >= 0) & (above != top_k):
        candidates = threshold + (digit.to(tl.uint32) << shift.to(tl.uint32))
        reach_counts = tl.zeros([BLOCK, DIGITS], tl.int32)
        for begin in range(0, vocab, BLOCK):
            inside = begin + i < vocab
            x = tl.load(scores + begin + i, mask=inside, other=float("-inf")).to(tl.float32)
            number = tl.where(inside, _sortable_bits(x), 0)  # below all candidates but the first
            reach_counts += (number[:, None] >= candidates[None, :]).to(tl.int32)
        counts = tl.sum(reach_counts, 0)
        best = tl.max(tl.where(counts >= top_k, digit, 0), 0)
        above = tl.sum(tl.where(digit == best, counts, 0), 0)
        threshold += best.to(tl.uint32) << shift.to(tl.uint32)
        shift -= 4
    bits = threshold.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _kept_mass(scores, vocab, peak, temperature, threshold, min_weight, upper, BLOCK: tl.constexpr):
    """Return the total weight of the kept tokens with a logit above `upper`."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - peak) / temperature)
        kept = (x >= threshold) & (weight >= min_weight) & (x > upper)
        total += tl.where(kept, weight, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _exponential_race(
    scores, vocab, key, peak, temperature, threshold, min_weight, upper, BLOCK: tl.constexpr, SKIPS_EMPTY: tl.constexpr
):
    """Return the winner of the race among the kept tokens with a logit above `upper`."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    index = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - peak) / temperature)
        kept = (x >= threshold) & (weight >= min_weight) & (x > upper)
        has_candidates = True
        if SKIPS_EMPTY:  # after the first race most blocks have no candidate
            has_candidates = tl.max(kept.to(tl.int32), 0) > 0
        if has_candidates:
            score = tl.where(kept, tl.div_rn(weight, exponential(key, begin + i)), -1.0)
            index = tl.where(score > best, begin + i, index)
            best = tl.maximum(best, score)
    _, token = first_argmax(best, index)
    return token


@triton.jit
def sample_row(scores, vocab, peak, setting_words, settings, row, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """Sample a token of a row with a temperature above 0; `peak` is its largest score."""
    key = tl.load(setting_words + row * 3).to(tl.uint64, bitcast=True)
    temperature = tl.load(settings + row * 6 + 2)
    top_p = tl.load(settings + row * 6 + 3)
    min_weight = tl.load(settings + row * 6 + 4)
    top_k = tl.load(settings + row * 6 + 5).to(tl.int32)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < vocab):
        threshold = _kth_largest(scores, vocab, top_k, BLOCK // 4, DIGITS)
    upper = tl.full((), float("-inf"), tl.float32)
    token = _exponential_race(scores, vocab, key, peak, temperature, threshold, min_weight, upper, BLOCK, False)
    if top_p < 1:
        goal = top_p.to(tl.float64) * _kept_mass(scores, vocab, peak, temperature, threshold, min_weight, upper, BLOCK)
        goal = tl.maximum(goal, SMALLEST_MASS)  # the argmax has mass 0 above it, which must stay below the goal
        upper = tl.load(scores + token).to(tl.float32)
        while _kept_mass(scores, vocab, peak, temperature, threshold, min_weight, upper, BLOCK) >= goal:
            token = _exponential_race(scores, vocab, key, peak, temperature, threshold, min_weight, upper, BLOCK, True)
            upper = tl.load(scores + token).to(tl.float32)
    return token


@triton.jit
def _sample_kernel(logits, setting_words, settings, tokens, stride, vocab, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    row = tl.program_id(0)
    scores = logits + row.to(tl.int64) * stride
    peak, token = argmax_row(scores, vocab, BLOCK)
    if tl.load(settings + row * 6 + 2) > 0:
        token = sample_row(scores, vocab, peak, setting_words, settings, row, BLOCK, DIGITS)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))


def sample_tokens(logits: Tensor, settings: Tensor, tokens: Tensor) -> None:
    """Sample one token per row of logits [rows, vocab] into `tokens` [rows], of any integer type.

    `settings` [rows, FIELDS] are 64-bit words on the device of the logits: the noise key, then pairs of float32,
    temperature and top-p, min-p and top-k. Temperature 0 takes the argmax, the first of equals.
    """
    rows, vocab = logits.shape
    floats = settings.view(torch.float32)
    warps = 16 if vocab > BLOCK else 4
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _sample_kernel[(rows,)](
        logits, settings, floats, tokens, logits.stride(0), vocab, BLOCK=max(64, block), DIGITS=DIGITS, num_warps=warps
    )
