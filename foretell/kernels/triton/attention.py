# mypy: ignore-errors
# Triton's kernels have no types that mypy could check.
"""Attention over pages for any number of rows a sequence, causal or by a tree, with or without a window.

The keys are cut at fixed places, whatever else is in the batch, and the parts are put together in a fixed order, so a
row's bits do not depend on who stands beside it. Keys of a tree's node are taken in the order of its path: its bits are
those of the same tokens in a chain. Parts that end before the tree are the same for all of its nodes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .room import Cut
from .tables import NO_PARTS, RowTables

TOGETHER = 8  # parts that are added up at once
TILE_BYTES = 16384  # of keys that a program looks at at once, at most


@triton.jit
def _begin(part):
    """The twin of `tables.begin`."""
    middle = 1024 + (part - 16) * 256
    return tl.where(part < 16, part * 64, tl.where(part < 28, middle, 4096 + (part - 28) * 512))


# A kernel for each size a step may have would be compiled where these were taken for constants, or for aligned.
@triton.jit(
    do_not_specialize=["row_count", "most_pages", "tile_count", "splits"],
    do_not_specialize_on_alignment=["tiles", "limits", "positions", "paths"],
)
def _attend(
    q, keys, values, out, logs, tiles, limits, positions, paths, pages,
    key_stride, heads, row_count, most_pages, tile_count, splits, scale,
    SHARE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, DEEP: tl.constexpr, REACHED: tl.constexpr, WHOLE: tl.constexpr,
    EXACT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile of rows or a piece of it, one key head, one part of the keys; scores are kept in powers of two."""
    item, head = tl.program_id(0), tl.program_id(1)
    tile, part = item // splits, item % splits
    if DEEP > 0:  # behind the tiles come the nodes, each with the part in which its tree begins and the next ones
        node_item = item - tile_count * splits
        tile = tl.where(node_item < 0, tile, tile_count + node_item // REACHED)
        part = tl.where(node_item < 0, part, node_item % REACHED + tl.load(tiles + tile * 6 + 4))
    first = tl.load(tiles + tile * 6)
    rows = tl.load(tiles + tile * 6 + 1)
    sequence = tl.load(tiles + tile * 6 + 2)
    stop = tl.load(tiles + tile * 6 + 3)
    if PIECES > 1:
        piece, head = head % PIECES, head // PIECES
        stop = tl.where(piece * HEIGHT < rows * SHARE, stop, 0)
    low, high = stop * 0, stop
    if not WHOLE:
        low = _begin(part)
        high = tl.minimum(_begin(part + 1), stop)
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
        best = tl.full([HEIGHT], float("-inf"), tl.float32)
        total = tl.zeros([HEIGHT], tl.float32)
        mixed = tl.zeros([PADDED, HEIGHT], tl.float32)
        for begin in range(low, high, BLOCK):
            key = begin + n
            inside = key < high
            index = key
            if DEEP > 0:  # a tile with a path is a single row
                base = tl.load(tiles + tile * 6 + 5)
                node = tl.load(paths + first * DEEP + key - base, mask=inside & (key >= base), other=0)
                index = tl.where(key >= base, base + node, key)
            page = tl.load(pages + sequence * most_pages + index // PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE + index % PAGE
            place = slot * key_stride + head * DIM
            k = tl.load(keys + place[:, None] + d[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            scores = tl.dot(k, query, input_precision="ieee" if EXACT else None) * scale
            seen = key[:, None] < limit[None, :]
            if WINDOW > 0:
                seen = seen & (key[:, None] > position[None, :] - WINDOW)
            scores = tl.where(seen & inside[:, None], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 0))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(scores - level[None, :])
            fade = tl.exp2(best - level)
            total = total * fade + tl.sum(weight, 0)
            v = tl.load(values + place[None, :] + d[:, None], mask=inside[None, :] & real[:, None], other=0.0)
            mixed = tl.dot(v, weight.to(v.dtype), mixed * fade[None, :], input_precision="ieee" if EXACT else None)
            best = higher
        total = tl.where(total == 0, 1.0, total)  # a row that sees nothing here: its best is -inf
        mixed = mixed / total[None, :]
        if not WHOLE:
            at += part.to(tl.int64) * row_count * heads
            tl.store(logs + at, best + tl.log2(total), mask=own)
        target = out + at[None, :] * DIM + d[:, None]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=own[None, :] & real[:, None])


@triton.jit(do_not_specialize=["row_count"], do_not_specialize_on_alignment=["reaches"])
def _join(
    parts_out, logs, out, reaches, heads, row_count,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The parts of one row under one query head, weighed by what they hold."""
    row, head = tl.program_id(0), tl.program_id(1)
    reach = tl.load(reaches + row)
    i = tl.arange(0, SPLITS)
    at = row * heads + head
    every = at + i.to(tl.int64) * row_count * heads
    best = tl.max(tl.load(logs + every, mask=_begin(i) < reach, other=float("-inf")), 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    d = tl.arange(0, PADDED)
    real = d < DIM
    total = best * 0
    mixed = tl.zeros([PADDED], tl.float32)
    some = tl.arange(0, TOGETHER)
    for begin in range(0, SPLITS, TOGETHER):
        part = begin + some
        place = at + part.to(tl.int64) * row_count * heads
        log = tl.load(logs + place, mask=_begin(part) < reach, other=float("-inf"))
        weight = tl.exp2(log - best)
        held = (log > float("-inf"))[:, None] & real[None, :]  # elsewhere lies what an earlier step left
        piece = tl.load(parts_out + place[:, None] * DIM + d[None, :], mask=held, other=0.0)
        total += tl.sum(weight, 0)
        mixed += tl.sum(piece * weight[:, None], 0)
    mixed = mixed / tl.where(total == 0, 1.0, total)
    tl.store(out + at.to(tl.int64) * DIM + d, mixed.to(out.dtype.element_ty), mask=real)


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: RowTables, scale: float, window: int | None) -> Tensor:
    """q [n, heads, dim] over keys and values [pages, page_size, kv_heads, dim] -> [n, heads * dim]."""
    n, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    sizes, padded = rows.sizes, max(16, triton.next_power_of_2(dim))
    whole = sizes.splits == NO_PARTS
    block = max(16, min(128 if whole else 64, TILE_BYTES // (padded * q.element_size())))
    # Rows that only fill up are in no tile; their parts join to zeros, and whole they would be what lay there before.
    out = (torch.zeros if whole else torch.empty)(n, heads * dim, dtype=q.dtype, device=q.device)
    pieces = out if whole else torch.empty(sizes.splits, n, heads, dim, dtype=torch.float32, device=q.device)
    logs = pieces if whole else torch.empty(sizes.splits, n, heads, dtype=torch.float32, device=q.device)
    splits = max(1, sizes.splits)
    exact = q.dtype == torch.float32
    cut = Cut.of(sizes.height, padded, exact)
    reached = 1 if whole else min(splits, 1 + triton.cdiv(sizes.deep, 64))
    _attend[(sizes.tiles * splits + sizes.nodes * reached, kv_heads * cut.pieces)](
        q, keys, values, pieces, logs, rows.tiles, rows.limits, rows.positions, rows.paths, rows.pages,
        kv_heads * dim, heads, n, rows.pages.shape[1], sizes.tiles, splits, scale * math.log2(math.e),
        SHARE=heads // kv_heads, DIM=dim, PADDED=padded, PAGE=page_size, HEIGHT=cut.rows, BLOCK=block,
        WINDOW=window or 0, DEEP=sizes.deep, REACHED=reached, WHOLE=whole, EXACT=exact, PIECES=cut.pieces,
        num_warps=cut.warps, num_stages=2,
    )  # fmt: skip
    if not whole:
        many = triton.next_power_of_2(max(sizes.splits, TOGETHER))
        _join[(n, heads)](
            pieces, logs, out, rows.reaches, heads, n,
            DIM=dim, PADDED=padded, SPLITS=many, TOGETHER=TOGETHER, num_warps=1,
        )  # fmt: skip
    return out
