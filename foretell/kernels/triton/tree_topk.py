# mypy: ignore-errors
"""The level of a head's tree: the likeliest children of each row, and which of all of them are followed farther."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sample import exponential

MOST_PARTS = 12  # programs that look for the likeliest of a row
FEW = 64  # guesses for which one kernel serves
LEAST = 1024  # outputs that one of them looks at, at least


@triton.jit
def _number(x, place):
    """Whole numbers in the order of the scores, and of equals the first place before the others."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _score(number):
    """What `_number` was given."""
    bits = (number >> 32).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _warm(x, heat):
    """Logits as they are drawn by, rounded as their definition rounds them."""
    return tl.div_rn(x, tl.maximum(heat, 1e-6))


@triton.jit(do_not_specialize=["key_stride"], do_not_specialize_on_alignment=["heats", "keys"])
def _best_of_part(
    logits, ids, heats, keys, bests, peaks, totals, stride, key_stride, count, rows,
    DRAWS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of some outputs of one row, and what all of them weigh against the likeliest: by their logits, or where
    its text draws, by how far each is ahead in the race."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + part
    i = part * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=real, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    heat = tl.load(heats + row // rows) if DRAWS else 0.0
    if heat > 0:
        key = tl.load(keys + row // rows * key_stride).to(tl.uint64, bitcast=True)
        weight = tl.exp(_warm(x, heat) - _warm(level, heat))
        peak = _warm(peak, heat)
        x = tl.div_rn(weight, exponential(key, tl.load(ids + i, mask=real, other=0)))
        total = tl.sum(x, 0)
    else:
        total = tl.sum(tl.exp(x - level), 0)
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)
    nothing = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    numbers = tl.where(real, _number(x, i), nothing)
    for rank in range(COUNT):
        best = tl.max(numbers, 0)
        tl.store(bests + at * COUNT + rank, best)
        numbers = tl.where(numbers == best, nothing, numbers)


@triton.jit(do_not_specialize_on_alignment=["heats", "tokens", "shares"])
def _best_of_row(
    bests, peaks, totals, ids, heats, tokens, shares, rows, wide,
    DRAWS: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr, PARTS_FILLED: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """The best of all parts of one row, each put where it stands in their order."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS_FILLED)
    peak = tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    highest = tl.max(peak, 0)
    total = tl.load(totals + row * PARTS + part, mask=part < PARTS, other=0.0)
    weight = tl.sum(total * tl.exp(peak - highest), 0)
    i = tl.arange(0, FILLED)
    nothing = tl.full([FILLED], -0x7FFFFFFFFFFFFFFF, tl.int64)
    number = tl.load(bests + row * PARTS * COUNT + i, mask=i < PARTS * COUNT, other=-0x7FFFFFFFFFFFFFFF)
    real = number > nothing
    place = 0x7FFFFFFF - (number & 0x7FFFFFFF).to(tl.int32)
    score = _score(number)
    heat = tl.load(heats + row // rows) if DRAWS else 0.0
    if heat > 0:  # each part has measured against its own likeliest
        own = tl.load(peaks + row * PARTS + i // COUNT, mask=real, other=float("-inf"))
        ahead = score * tl.exp(own - highest)
        number = tl.where(real, _number(ahead, place), nothing)
    else:
        ahead = tl.exp(score - highest)
    rank = tl.sum((number[None, :] > number[:, None]).to(tl.int32), 1)
    kept = real & (rank < COUNT)
    to = ((row // rows) * wide + row % rows) * COUNT + rank
    token = tl.load(ids + place, mask=kept, other=0)
    tl.store(tokens + to, token.to(tl.float32), mask=kept)
    tl.store(shares + to, tl.div_rn(ahead, weight), mask=kept)  # all of it is 1, not a bit more


@dataclass(frozen=True)
class Noise:
    """What each text draws with: `heats` [texts], 0 where it does not, and `keys` [texts] of noise."""

    heats: Tensor
    keys: Tensor


def best_children(logits: Tensor, ids: Tensor, noise: Noise | None, tokens: Tensor, shares: Tensor) -> None:
    """Of logits [texts * rows, outputs] the best, as many as there is room for in `tokens` and `shares` [texts, wide,
    children]: their ids and the share of each; of equals the first.

    They are the likeliest, or with noise those farthest ahead in their text's race, with a share in all that is run.
    """
    (n, outputs), (texts, wide, children) = logits.shape, tokens.shape
    block = max(LEAST, triton.next_power_of_2(triton.cdiv(outputs, MOST_PARTS)))
    parts = triton.cdiv(outputs, block)
    bests = torch.empty(n, parts, children, dtype=torch.int64, device=logits.device)
    peaks, totals = torch.empty(2, n, parts, dtype=torch.float32, device=logits.device)
    heats, keys = (shares, ids) if noise is None else (noise.heats, noise.keys)
    draws, each = noise is not None, 1024 if noise is None else 512  # noise takes registers
    _best_of_part[(n, parts)](
        logits, ids, heats, keys, bests, peaks, totals, logits.stride(0), keys.stride(0), outputs, n // texts,
        DRAWS=draws, COUNT=children, BLOCK=block, num_warps=max(4, min(16, block // each)),
    )  # fmt: skip
    _best_of_row[(n,)](
        bests, peaks, totals, ids, heats, tokens, shares, n // texts, wide,
        DRAWS=draws, COUNT=children, PARTS=parts, PARTS_FILLED=triton.next_power_of_2(parts),
        FILLED=triton.next_power_of_2(parts * children), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "guesses", "width_stride"])
def _descend(
    tokens, shares, followed, chances, ways, widths, next_chances, next_tokens, before, next_ways,
    width_stride, first, guesses,
    ROOT: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr, WIDE_FILLED: tl.constexpr, GUESSES_FILLED: tl.constexpr,
):  # fmt: skip
    """One text: its best children in the order in which they were found."""
    text = tl.program_id(0)
    i = tl.arange(0, CANDIDATES)
    real = i < ROWS * COUNT
    row = i // COUNT
    worth = tl.load(shares + text * WIDE * COUNT + i, mask=real, other=0.0).to(tl.float64)
    if not ROOT:
        worth = tl.load(chances + text * WIDE + row, mask=real, other=0.0) * worth
    worth = tl.where(real, worth, -1.0)
    before_it = i[None, :] < i[:, None]
    better = (worth[None, :] > worth[:, None]) | ((worth[None, :] == worth[:, None]) & before_it)
    rank = tl.sum(better.to(tl.int32), 1)
    chosen = real & (rank < WIDE)
    place = tl.sum((chosen[None, :] & before_it).to(tl.int32), 1)
    # What is beyond a text's own width is not followed there, and must not crowd out what hangs on the others.
    stays = rank < tl.load(widths + text * width_stride)
    to = text * WIDE + place
    tl.store(followed + to * COUNT, i.to(tl.float32), mask=chosen)
    tl.store(next_chances + to, tl.where(stays, worth, 0.0), mask=chosen)
    token = tl.load(tokens + text * WIDE * COUNT + i, mask=chosen, other=0.0)
    tl.store(next_tokens + to, token.to(tl.int64), mask=chosen)
    tl.store(before + to, (text * ROWS + row).to(tl.int64), mask=chosen)
    p = tl.arange(0, WIDE_FILLED)
    g = tl.arange(0, GUESSES_FILLED)
    parent = tl.sum(tl.where((place[None, :] == p[:, None]) & chosen[None, :], row[None, :], 0), 1)
    inside = (p < WIDE)[:, None] & (g < guesses)[None, :]
    seen = (g[None, :] == first + p[:, None]) | (g == 0)[None, :]
    if not ROOT:
        above = tl.load(ways + (text * ROWS + parent)[:, None] * guesses + g[None, :], mask=inside, other=0)
        seen = seen | (above != 0)
    tl.store(next_ways + (text * WIDE + p)[:, None] * guesses + g[None, :], seen.to(tl.int8), mask=inside)


@dataclass(frozen=True)
class Branches:
    """What a level's rows hang on."""

    chances: Tensor  # [texts, wide], in float64
    tokens: Tensor  # [texts * wide]
    before: Tensor  # [texts * wide]: the rows of the level above
    ways: Tensor  # [texts * wide, guesses], in int8: guesses on the way to each row, and itself


def descend(told: Tensor, widths: Tensor, above: Branches | None, first: int, guesses: int) -> Branches:
    """Follow the best children. `flush` [tokens, shares, followed; texts, wide, children] is what was looked at of the
    level `above`, the root where there is none; which are followed is noted there. Their guesses begin at `first`."""
    _, texts, wide, children = told.shape
    rows, device = 1 if above is None else wide, told.device
    found = Branches(
        torch.empty(texts, wide, dtype=torch.float64, device=device),
        torch.empty(texts * wide, dtype=torch.int64, device=device),
        torch.empty(texts * wide, dtype=torch.int64, device=device),
        torch.empty(texts * wide, guesses, dtype=torch.int8, device=device),
    )
    old = found if above is None else above
    _descend[(texts,)](
        told[0], told[1], told[2], old.chances, old.ways, widths, found.chances, found.tokens, found.before, found.ways,
        widths.stride(0), first, guesses,
        ROOT=above is None, ROWS=rows, COUNT=children, WIDE=wide,
        CANDIDATES=triton.next_power_of_2(rows * children), WIDE_FILLED=triton.next_power_of_2(wide),
        GUESSES_FILLED=triton.next_power_of_2(max(FEW, guesses)), num_warps=4,
    )  # fmt: skip
    return found
