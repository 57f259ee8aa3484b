# mypy: ignore-errors
# Triton's kernels have no types that mypy could check.
"""Attention over pages for any number of rows a sequence, causal or by a tree, with or without a window.

The keys are cut at fixed places, whatever else is in the batch, and the parts are put together in a fixed order, so a
row's bits do not depend on who stands beside it. Keys of a tree's node are taken in the order of its path: its bits are
those of the same tokens in a chain. Parts that end before the tree are the same for all of its nodes.

A part is what its blocks of keys are, put together one after the other. Short parts are put together by four, then
these fours and the longer parts. Who does it makes no difference: where there are many rows one program reads four
parts, where there are few each has its own, so that the device has enough to do, and `_join` does the rest. Where there
are programs enough with one for each tile, it has all of the tile's keys, and puts together what `_join` would.

Keys can only be asked for once it is known in which pages they lie. Where there are few programs, each with all keys of
its rows, it learns that ahead: else it would wait for the pages and then for the keys in each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_limits import Cut, stages_that_fit
from .row_tables import NO_PARTS, RowTables, Sizes

FOUR = 4  # short parts that are put together first
SHORT_PARTS, SHORT_KEYS = 16, 64
TOGETHER = 4  # longer parts that are asked for at once
ENOUGH = 20_000  # rows of programs that keep an H200 busy
TILE_BYTES = 16384  # of keys that a program looks at at once, at most

CLEARED: tl.constexpr = tl.constexpr(16)  # rows that only fill up, of which a program sees to so many in one go

ALONE_PROGRAMS = 120  # so many have enough to do with all of their keys: an H200 has 132 multiprocessors
MANY_PROGRAMS = 600  # so many do not wait for each other's keys
ALONE_PARTS, MANY_PARTS = 16, 28  # of keys, at most; more are shared
STAGES = 2  # blocks of keys on their way and in use
AHEAD_STAGES = 3  # where their pages are known ahead
STAGE_BYTES = 98304  # of all stages: so a multiprocessor of an H200 has room for two programs at least


@triton.jit
def _begin(part):
    """The twin of `tables.begin`."""
    middle = 1024 + (part - 16) * 256
    return tl.where(part < 16, part * 64, tl.where(part < 28, middle, 4096 + (part - 28) * 512))


@triton.jit
def _weights(best, other):
    """Of what was seen and of what else is: the larger of their largest scores, and what each counts beside it."""
    higher = tl.maximum(best, other)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(best - level), tl.exp2(other - level)


@triton.jit
def _together(best, total, mixed, top, count, values):
    """What was seen so far and what else was: the largest score, the sum of weights, and their values [dim, rows]."""
    higher, fade, gain = _weights(best, top)
    return higher, tl.fma(count, gain, total * fade), tl.fma(values, gain[None, :], mixed * fade[None, :])


@triton.jit
def _ends_a_part(key):
    """Whether what `_join` puts together next ends before this key: four short parts, or a longer one, as `_begin` has
    it."""
    return (key % 256 == 0) & ((key <= 4096) | (key % 512 == 0))


@triton.jit
def _parts(keys):
    """The twin of `tables.parts`."""
    middle = 16 + (tl.maximum(keys, 1024) - 1024 + 255) // 256
    far = 28 + (tl.maximum(keys, 4096) - 4096 + 511) // 512
    return tl.where(keys <= 1024, (keys + 63) // 64, tl.where(keys <= 4096, middle, far))


@triton.jit
def _work(tiles, tile_count, splits, DEEP: tl.constexpr, REACHED: tl.constexpr, FOURS: tl.constexpr):
    """What this program does: a tile, from one part of the keys up to another."""
    item = tl.program_id(0)
    tile, part = item // splits, item % splits
    behind = part + 1
    if FOURS:
        short = part < 4
        behind = tl.where(short, 4 * part + 4, part + 13)
        part = tl.where(short, 4 * part, part + 12)
    if DEEP > 0:  # behind the tiles come the nodes, each with the part in which its tree begins and the next ones
        node_item = item - tile_count * splits
        tile = tl.where(node_item < 0, tile, tile_count + node_item // REACHED)
        part = tl.where(node_item < 0, part, node_item % REACHED + tl.load(tiles + tile * 6 + 4))
        behind = part + 1
    return tile, part, behind


@triton.jit
def _with_block(best, total, mixed, scores, v, WHOLE: tl.constexpr, EXACT: tl.constexpr):
    """What was seen so far and a block of keys: the largest score, the sum of weights, and their values."""
    if WHOLE:
        higher, fade, _ = _weights(best, tl.max(scores, 0))
        weight = tl.exp2(scores - tl.where(higher == float("-inf"), 0.0, higher)[None, :])
        total = total * fade + tl.sum(weight, 0)
        mixed = tl.dot(v, weight.to(v.dtype), mixed * fade[None, :], input_precision="ieee" if EXACT else None)
    else:  # a block by itself, and then with those before it, as `_join` would put them together
        top = tl.max(scores, 0)
        weight = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[None, :])
        here = tl.dot(v, weight.to(v.dtype), input_precision="ieee" if EXACT else None)
        higher, total, mixed = _together(best, total, mixed, top, tl.sum(weight, 0), here)
    return higher, total, mixed


@triton.jit
def _clear(
    out, reaches, head, tile, tile_count, heads, row_count,
    SHARE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows that only fill up, or have ended, are nobody's: each program sees to some of them, under its own heads."""
    d = tl.arange(0, PADDED)
    for first in range(tile, row_count, tile_count * CLEARED):
        row = first + tile_count * tl.arange(0, CLEARED)
        idle = tl.load(reaches + row, mask=row < row_count, other=1) == 0
        for more in tl.static_range(SHARE):
            at = (row * heads + head * SHARE + more).to(tl.int64)
            nothing = tl.zeros([CLEARED, PADDED], out.dtype.element_ty)
            tl.store(out + at[:, None] * DIM + d[None, :], nothing, mask=idle[:, None] & (d < DIM)[None, :])


# A kernel for each size a step may have would be compiled where these were taken for constants, or for aligned.
@triton.jit(
    do_not_specialize=["row_count", "most_pages", "tile_count", "splits"],
    do_not_specialize_on_alignment=["tiles", "limits", "positions", "paths"],
)
def _attend(
    q, keys, values, out, tops, totals, tiles, limits, positions, paths, pages,
    key_stride, heads, row_count, most_pages, tile_count, splits, scale,
    SHARE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, DEEP: tl.constexpr, REACHED: tl.constexpr, WHOLE: tl.constexpr,
    FOURS: tl.constexpr, ALONE: tl.constexpr, AHEAD: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile of rows or a piece of it, one key head, one part of the keys or four short ones or all; scores are kept
    in powers of two."""
    head = tl.program_id(1)
    tile, part, behind = _work(tiles, tile_count, splits, DEEP, REACHED, FOURS)
    first = tl.load(tiles + tile * 6)
    rows = tl.load(tiles + tile * 6 + 1)
    sequence = tl.load(tiles + tile * 6 + 2)
    stop = tl.load(tiles + tile * 6 + 3)
    if PIECES > 1:
        piece, head = head % PIECES, head // PIECES
        stop = tl.where(piece * HEIGHT < rows * SHARE, stop, 0)
    low, high = stop * 0, stop
    if ALONE:
        _clear(out, limits, head, tile, tile_count, heads, row_count, SHARE, DIM, PADDED)
    elif not WHOLE:
        low = _begin(part)
        high = tl.minimum(_begin(behind), stop)
    if low < stop:
        m = tl.arange(0, HEIGHT)
        if PIECES > 1:
            m += piece * HEIGHT
        d = tl.arange(0, PADDED)
        n = tl.arange(0, BLOCK)
        row = first + m // SHARE
        own = m < rows * SHARE
        query_head = head * SHARE + m % SHARE
        at = (row * heads + query_head).to(tl.int64)
        real = d < DIM
        # Keys stand left and queries right: the products are the same instructions for few rows and for many.
        query = tl.load(q + at[None, :] * DIM + d[:, None], mask=own[None, :] & real[:, None], other=0.0)
        limit = tl.load(limits + row, mask=own, other=0)
        if WINDOW > 0:
            position = tl.load(positions + row, mask=own, other=1 << 30)
            lowest = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0)
            low = tl.maximum(low, lowest // BLOCK * BLOCK)
        own_pages = pages + sequence * most_pages
        if AHEAD:
            coming = tl.load(own_pages + (low + n) // PAGE, mask=low + n < high, other=0)
        best = tl.full([HEIGHT], float("-inf"), tl.float32)
        total = tl.zeros([HEIGHT], tl.float32)
        mixed = tl.zeros([PADDED, HEIGHT], tl.float32)
        if ALONE:
            joined_best, joined_total, joined_mixed = best, total, mixed
        for begin in range(low, high, BLOCK):
            key = begin + n
            inside = key < high
            index = key
            if DEEP > 0:  # a tile with a path is a single row
                base = tl.load(tiles + tile * 6 + 5)
                node = tl.load(paths + first * DEEP + key - base, mask=inside & (key >= base), other=0)
                index = tl.where(key >= base, base + node, key)
            if AHEAD:
                page, later = coming, key + BLOCK
                coming = tl.load(own_pages + later // PAGE, mask=later < high, other=0)
            else:
                page = tl.load(own_pages + index // PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE + index % PAGE
            place = slot * key_stride + head * DIM
            k = tl.load(keys + place[:, None] + d[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            scores = tl.dot(k, query, input_precision="ieee" if EXACT else None) * scale
            seen = key[:, None] < limit[None, :]
            if WINDOW > 0:
                seen = seen & (key[:, None] > position[None, :] - WINDOW)
            scores = tl.where(seen & inside[:, None], scores, float("-inf"))
            v = tl.load(values + place[None, :] + d[:, None], mask=inside[None, :] & real[:, None], other=0.0)
            best, total, mixed = _with_block(best, total, mixed, scores, v, WHOLE, EXACT)
            if ALONE:
                ended = begin + BLOCK
                if _ends_a_part(ended) | (ended >= high):
                    joined_best, joined_total, joined_mixed = _together(
                        joined_best, joined_total, joined_mixed, best, total, mixed
                    )
                    best = tl.full([HEIGHT], float("-inf"), tl.float32)
                    total = tl.zeros([HEIGHT], tl.float32)
                    mixed = tl.zeros([PADDED, HEIGHT], tl.float32)
        if ALONE:
            total, mixed = joined_total, joined_mixed
        if WHOLE or ALONE:
            mixed = mixed / tl.where(total == 0, 1.0, total)[None, :]  # of a row that sees nothing it is 0
        else:
            at += part.to(tl.int64) * row_count * heads
            tl.store(tops + at, best, mask=own)
            tl.store(totals + at, total, mask=own)
        target = out + at[None, :] * DIM + d[:, None]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=own[None, :] & real[:, None])


@triton.jit
def _with_part(best, total, mixed, place, seen, pieces, tops, totals, d, DIM: tl.constexpr):
    """What was seen so far and what one part left: the largest score, the sum of weights, and their values."""
    top = tl.load(tops + place, mask=seen, other=float("-inf"))
    count = tl.load(totals + place, mask=seen, other=0.0)
    values = tl.load(pieces + place * DIM + d, mask=d < tl.where(seen, DIM, 0), other=0.0)
    best, fade, gain = _weights(best, top)
    return best, tl.fma(count, gain, total * fade), tl.fma(values, gain, mixed * fade)


@triton.jit(do_not_specialize=["row_count"], do_not_specialize_on_alignment=["reaches"])
def _join(
    pieces, tops, totals, out, reaches, heads, row_count,
    DIM: tl.constexpr, PADDED: tl.constexpr, FOURS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The parts of one row under one query head, in their order: the short ones by four, unless that is done."""
    row, head = tl.program_id(0), tl.program_id(1)
    reach = tl.load(reaches + row)
    d = tl.arange(0, PADDED)
    at = (row * heads + head).to(tl.int64)
    each = row_count.to(tl.int64) * heads
    none, nothing, empty = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), d.to(tl.float32) * 0
    best, total, mixed = none, nothing, empty
    for four in tl.static_range(0, 16, 4):
        top, count, values = none, nothing, empty
        for part in tl.static_range(four, four + (1 if FOURS else 4)):
            place, seen = at + part * each, reach > part * 64
            top, count, values = _with_part(top, count, values, place, seen, pieces, tops, totals, d, DIM)
        best, fade, gain = _weights(best, top)
        total, mixed = tl.fma(count, gain, total * fade), tl.fma(values, gain, mixed * fade)
    for first in range(16, _parts(reach), TOGETHER):
        for more in tl.static_range(TOGETHER):
            place, seen = at + (first + more) * each, reach > _begin(first + more)
            best, total, mixed = _with_part(best, total, mixed, place, seen, pieces, tops, totals, d, DIM)
    mixed = mixed / tl.where(total == 0, 1.0, total)
    tl.store(out + at * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class Way:
    """Who reads which keys, and when they are asked for. No bit hangs on it."""

    fours: bool = False  # a program has four short parts
    alone: bool = False  # a program has all keys of its rows, and nothing is left to join
    ahead: bool = False  # it learns in which pages a block of keys lies while it looks at the one before

    @classmethod
    def of(cls, sizes: Sizes, block: int, kv_heads: int, exact: bool) -> Way:
        """For a step of these sizes, with so many keys in a block. In float32 programs have enough to do by themselves;
        of the widest heads they have no registers left; a node's keys lie as its path goes."""
        if sizes.splits == NO_PARTS or sizes.deep or exact or block != SHORT_KEYS:
            return cls(_by_four(sizes, block, kv_heads))
        programs = sizes.tiles * kv_heads
        many = programs >= MANY_PROGRAMS
        if programs >= ALONE_PROGRAMS and sizes.splits <= (MANY_PARTS if many else ALONE_PARTS):
            return cls(alone=True, ahead=not many)
        return cls(_by_four(sizes, block, kv_heads))

    def stages(self, each: int, device: torch.device) -> int:
        """How many blocks of keys and values, of so many bytes, are on their way and in use. What else a program has
        takes less than one more."""
        wanted = min(AHEAD_STAGES, STAGE_BYTES // each)
        return max(STAGES, stages_that_fit(wanted + 1, each, device) - 1) if self.ahead else STAGES


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: RowTables, scale: float, window: int | None) -> Tensor:
    """q [n, heads, dim] over keys and values [pages, page_size, kv_heads, dim] -> [n, heads * dim]."""
    n, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    sizes, padded = rows.sizes, max(16, triton.next_power_of_2(dim))
    whole = sizes.splits == NO_PARTS
    block = max(16, min(128 if whole else SHORT_KEYS, TILE_BYTES // (padded * q.element_size())))
    exact = q.dtype == torch.float32
    cut = Cut.of(sizes.height, padded, exact)
    way = Way.of(sizes, block, kv_heads, exact)
    # Rows that only fill up are in no tile; their parts join to zeros, and whole they would be what lay there before.
    out = (torch.zeros if whole else torch.empty)(n, heads * dim, dtype=q.dtype, device=q.device)
    pieces = tops = totals = out
    if joins := not whole and not way.alone:
        pieces = torch.empty(sizes.splits, n, heads, dim, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, sizes.splits, n, heads, dtype=torch.float32, device=q.device)
    splits = (fours_of(sizes.splits) if way.fours else sizes.splits) if joins else 1
    reached = 1 if whole else min(splits, 1 + triton.cdiv(sizes.deep, 64))
    stages = way.stages(2 * block * padded * q.element_size(), q.device)
    _attend[(sizes.tiles * splits + sizes.nodes * reached, kv_heads * cut.pieces)](
        q, keys, values, pieces, tops, totals, rows.tiles, rows.reaches if way.alone else rows.limits, rows.positions,
        rows.paths, rows.pages, kv_heads * dim, heads, n, rows.pages.shape[1], sizes.tiles, splits,
        scale * math.log2(math.e), SHARE=heads // kv_heads, DIM=dim, PADDED=padded, PAGE=page_size, HEIGHT=cut.rows,
        BLOCK=block, WINDOW=window or 0, DEEP=sizes.deep, REACHED=reached, WHOLE=whole, FOURS=way.fours,
        ALONE=way.alone, AHEAD=way.ahead, EXACT=exact, PIECES=cut.pieces, num_warps=cut.warps, num_stages=stages,
    )  # fmt: skip
    if joins:
        _join[(n, heads)](
            pieces, tops, totals, out, rows.reaches, heads, n,
            DIM=dim, PADDED=padded, FOURS=way.fours, TOGETHER=TOGETHER, num_warps=1,
        )  # fmt: skip
    return out


def fours_of(splits: int) -> int:
    """So many parts, the short ones by four."""
    return triton.cdiv(min(splits, SHORT_PARTS), FOUR) + max(0, splits - SHORT_PARTS)


def _by_four(sizes: Sizes, block: int, kv_heads: int) -> bool:
    """Whether a program has four short parts: where a part is a block of keys, and where there are programs enough.
    The nodes of a tree share their short parts one by one."""
    if sizes.splits == NO_PARTS or sizes.deep or block != SHORT_KEYS:
        return False
    return sizes.tiles * fours_of(sizes.splits) * kv_heads * sizes.height >= ENOUGH
