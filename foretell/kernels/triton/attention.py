# mypy: ignore-errors
# mypy cannot check the types of Triton kernels.
"""Paged attention for any number of rows per sequence, causal or with a tree mask, with or without a sliding window.

The keys of a sequence are split at fixed positions, whatever else is in the batch, and the splits are merged in a fixed
order (split-K, as in Flash-Decoding). So a row's result does not depend on the other rows. The keys of a tree node are
read in the order of its path, so its result equals that of the same tokens in a chain. Splits that end before the tree
are the same for all of its nodes.

A split accumulates its blocks of keys in order. Short splits are merged in groups of four, then the groups and the
longer splits are merged. Which program does the work makes no difference to the result: with many rows one program
reads a group of four splits; with few rows each split has its own program, to occupy the device, and
`_merge_splits_kernel` merges. If one program per tile occupies the device, it reads all keys of the tile and merges in
the same order itself.

Keys can be loaded only once their pages are known. With few programs that each read all keys of their rows, a program
prefetches the page numbers of the next block; otherwise each block would wait for its pages and then for its keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_limits import AttentionTiling, fit_stages
from .row_tables import NO_SPLIT, RowTables, StepShape

SPLIT_GROUP = 4  # short splits that are merged first
SHORT_SPLITS = 16  # splits of SHORT_KEYS keys at the start of a sequence
SHORT_KEYS = 64  # keys of a short split
MERGE_UNROLL = 4  # longer splits that `_merge_splits_kernel` loads at once
ENOUGH_ROWS = 20_000  # rows over all programs that occupy an H200
TILE_BYTES = 16384  # upper bound of the keys that a program loads at once

ROWS_PER_CLEAR: tl.constexpr = tl.constexpr(16)  # padded rows that a program zeroes at once

SINGLE_PROGRAMS = 120  # programs that occupy an H200 (132 multiprocessors) when each reads all its keys
MANY_PROGRAMS = 600  # programs that hide each other's memory latency, so that prefetching pages gains nothing
SINGLE_SPLITS = 16  # longest context, in splits, that one program reads by itself
MANY_SPLITS = 28  # the same with MANY_PROGRAMS
STAGES = 2  # pipeline stages: blocks of keys in flight and in use
PREFETCH_STAGES = 3  # the same if pages are prefetched
STAGE_BYTES = 98304  # shared memory of all stages, so that a multiprocessor of an H200 holds at least two programs


@triton.jit
def _split_start(split):
    """Return the first key of a split, as `row_tables.split_start` does."""
    middle = 1024 + (split - 16) * 256
    return tl.where(split < 16, split * 64, tl.where(split < 28, middle, 4096 + (split - 28) * 512))


@triton.jit
def _rescale(best, other):
    """Return the larger of two peaks and the factors that rescale sums relative to either peak (online softmax)."""
    higher = tl.maximum(best, other)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(best - level), tl.exp2(other - level)


@triton.jit
def _merge(best, total, accumulator, top, count, values):
    """Merge two partial softmax results: the largest score, the sum of weights and the weighted values [dim, rows]."""
    higher, decay, new_weight = _rescale(best, top)
    return (
        higher,
        tl.fma(count, new_weight, total * decay),
        tl.fma(values, new_weight[None, :], accumulator * decay[None, :]),
    )


@triton.jit
def _ends_split(key):
    """Return whether a unit of `_merge_splits_kernel`, four short splits or a longer one, ends before this key."""
    return (key % 256 == 0) & ((key <= 4096) | (key % 512 == 0))


@triton.jit
def _num_splits(keys):
    """Return the number of splits of a context, as `row_tables.num_splits` does."""
    middle = 16 + (tl.maximum(keys, 1024) - 1024 + 255) // 256
    far = 28 + (tl.maximum(keys, 4096) - 4096 + 511) // 512
    return tl.where(keys <= 1024, (keys + 63) // 64, tl.where(keys <= 4096, middle, far))


@triton.jit
def _program_work(
    tiles, tile_count, splits, PATH_LENGTH: tl.constexpr, NODE_SPLITS: tl.constexpr, GROUPED: tl.constexpr
):
    """Return the tile of this program, its first split and the one after its last."""
    item = tl.program_id(0)
    tile, split = item // splits, item % splits
    next_split = split + 1
    if GROUPED:
        short = split < 4
        next_split = tl.where(short, 4 * split + 4, split + 13)
        split = tl.where(short, 4 * split, split + 12)
    if PATH_LENGTH > 0:  # after the tiles come single nodes, each with the splits from the one where its tree begins
        node_item = item - tile_count * splits
        tile = tl.where(node_item < 0, tile, tile_count + node_item // NODE_SPLITS)
        split = tl.where(node_item < 0, split, node_item % NODE_SPLITS + tl.load(tiles + tile * 6 + 4))
        next_split = split + 1
    return tile, split, next_split


@triton.jit
def _accumulate_block(best, total, accumulator, scores, v, UNSPLIT: tl.constexpr, EXACT: tl.constexpr):
    """Add a block of keys to a partial softmax result: the largest score, the sum of weights, the weighted values."""
    if UNSPLIT:
        higher, decay, _ = _rescale(best, tl.max(scores, 0))
        weight = tl.exp2(scores - tl.where(higher == float("-inf"), 0.0, higher)[None, :])
        total = total * decay + tl.sum(weight, 0)
        accumulator = tl.dot(
            v, weight.to(v.dtype), accumulator * decay[None, :], input_precision="ieee" if EXACT else None
        )
    else:  # the block by itself, then merged with those before it, in the order of `_merge_splits_kernel`
        top = tl.max(scores, 0)
        weight = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[None, :])
        here = tl.dot(v, weight.to(v.dtype), input_precision="ieee" if EXACT else None)
        higher, total, accumulator = _merge(best, total, accumulator, top, tl.sum(weight, 0), here)
    return higher, total, accumulator


@triton.jit
def _zero_idle_rows(
    out, visible_keys, head, tile, tile_count, heads, row_count,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Zero the output of padded and finished rows; each program zeroes some of them, for its own heads."""
    d = tl.arange(0, PADDED)
    for first in range(tile, row_count, tile_count * ROWS_PER_CLEAR):
        row = first + tile_count * tl.arange(0, ROWS_PER_CLEAR)
        is_idle = tl.load(visible_keys + row, mask=row < row_count, other=1) == 0
        for more in tl.static_range(GROUP):
            at = (row * heads + head * GROUP + more).to(tl.int64)
            nothing = tl.zeros([ROWS_PER_CLEAR, PADDED], out.dtype.element_ty)
            tl.store(out + at[:, None] * DIM + d[None, :], nothing, mask=is_idle[:, None] & (d < DIM)[None, :])


# Specializing on these would compile a kernel for every size of a step.
@triton.jit(
    do_not_specialize=["row_count", "most_pages", "tile_count", "splits"],
    do_not_specialize_on_alignment=["tiles", "key_limits", "positions", "paths"],
)
def _paged_attention_kernel(
    q, keys, values, out, peaks, totals, tiles, key_limits, positions, paths, pages,
    key_stride, heads, row_count, most_pages, tile_count, splits, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, PATH_LENGTH: tl.constexpr, NODE_SPLITS: tl.constexpr,
    UNSPLIT: tl.constexpr, GROUPED: tl.constexpr, SINGLE_PROGRAM: tl.constexpr, PREFETCH: tl.constexpr,
    EXACT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Process a tile of rows, or a piece of it, for one KV head: one split of the keys, a group of short ones, or all.

    Scores are in base 2, for `exp2`.
    """
    head = tl.program_id(1)
    tile, split, next_split = _program_work(tiles, tile_count, splits, PATH_LENGTH, NODE_SPLITS, GROUPED)
    first = tl.load(tiles + tile * 6)
    rows = tl.load(tiles + tile * 6 + 1)
    sequence = tl.load(tiles + tile * 6 + 2)
    stop = tl.load(tiles + tile * 6 + 3)
    if PIECES > 1:
        piece, head = head % PIECES, head // PIECES
        stop = tl.where(piece * HEIGHT < rows * GROUP, stop, 0)
    low, high = stop * 0, stop
    if SINGLE_PROGRAM:
        _zero_idle_rows(out, key_limits, head, tile, tile_count, heads, row_count, GROUP, DIM, PADDED)
    elif not UNSPLIT:
        low = _split_start(split)
        high = tl.minimum(_split_start(next_split), stop)
    if low < stop:
        m = tl.arange(0, HEIGHT)
        if PIECES > 1:
            m += piece * HEIGHT
        d = tl.arange(0, PADDED)
        n = tl.arange(0, BLOCK)
        row = first + m // GROUP
        own = m < rows * GROUP
        query_head = head * GROUP + m % GROUP
        at = (row * heads + query_head).to(tl.int64)
        valid = d < DIM
        # Keys are the left operand and queries the right one, so few and many rows use the same instructions.
        query = tl.load(q + at[None, :] * DIM + d[:, None], mask=own[None, :] & valid[:, None], other=0.0)
        limit = tl.load(key_limits + row, mask=own, other=0)
        if WINDOW > 0:
            position = tl.load(positions + row, mask=own, other=1 << 30)
            lowest = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0)
            low = tl.maximum(low, lowest // BLOCK * BLOCK)
        own_pages = pages + sequence * most_pages
        if PREFETCH:
            next_page = tl.load(own_pages + (low + n) // PAGE, mask=low + n < high, other=0)
        best = tl.full([HEIGHT], float("-inf"), tl.float32)
        total = tl.zeros([HEIGHT], tl.float32)
        accumulator = tl.zeros([PADDED, HEIGHT], tl.float32)
        if SINGLE_PROGRAM:
            merged_best, merged_total, merged_accumulator = best, total, accumulator
        for begin in range(low, high, BLOCK):
            key = begin + n
            inside = key < high
            index = key
            if PATH_LENGTH > 0:  # a tile with a path has a single row
                base = tl.load(tiles + tile * 6 + 5)
                node = tl.load(paths + first * PATH_LENGTH + key - base, mask=inside & (key >= base), other=0)
                index = tl.where(key >= base, base + node, key)
            if PREFETCH:
                page, later = next_page, key + BLOCK
                next_page = tl.load(own_pages + later // PAGE, mask=later < high, other=0)
            else:
                page = tl.load(own_pages + index // PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE + index % PAGE
            offset = slot * key_stride + head * DIM
            k = tl.load(keys + offset[:, None] + d[None, :], mask=inside[:, None] & valid[None, :], other=0.0)
            scores = tl.dot(k, query, input_precision="ieee" if EXACT else None) * scale
            seen = key[:, None] < limit[None, :]
            if WINDOW > 0:
                seen = seen & (key[:, None] > position[None, :] - WINDOW)
            scores = tl.where(seen & inside[:, None], scores, float("-inf"))
            v = tl.load(values + offset[None, :] + d[:, None], mask=inside[None, :] & valid[:, None], other=0.0)
            best, total, accumulator = _accumulate_block(best, total, accumulator, scores, v, UNSPLIT, EXACT)
            if SINGLE_PROGRAM:
                ended = begin + BLOCK
                if _ends_split(ended) | (ended >= high):
                    merged_best, merged_total, merged_accumulator = _merge(
                        merged_best, merged_total, merged_accumulator, best, total, accumulator
                    )
                    best = tl.full([HEIGHT], float("-inf"), tl.float32)
                    total = tl.zeros([HEIGHT], tl.float32)
                    accumulator = tl.zeros([PADDED, HEIGHT], tl.float32)
        if SINGLE_PROGRAM:
            total, accumulator = merged_total, merged_accumulator
        if UNSPLIT or SINGLE_PROGRAM:
            accumulator = accumulator / tl.where(total == 0, 1.0, total)[None, :]  # 0 for a row that sees no key
        else:
            at += split.to(tl.int64) * row_count * heads
            tl.store(peaks + at, best, mask=own)
            tl.store(totals + at, total, mask=own)
        target = out + at[None, :] * DIM + d[:, None]
        tl.store(target, accumulator.to(out.dtype.element_ty), mask=own[None, :] & valid[:, None])


@triton.jit
def _accumulate_split(best, total, accumulator, offset, seen, partials, peaks, totals, d, DIM: tl.constexpr):
    """Merge the stored result of one split into a partial softmax result."""
    top = tl.load(peaks + offset, mask=seen, other=float("-inf"))
    count = tl.load(totals + offset, mask=seen, other=0.0)
    values = tl.load(partials + offset * DIM + d, mask=d < tl.where(seen, DIM, 0), other=0.0)
    best, decay, new_weight = _rescale(best, top)
    return best, tl.fma(count, new_weight, total * decay), tl.fma(values, new_weight, accumulator * decay)


@triton.jit(do_not_specialize=["row_count"], do_not_specialize_on_alignment=["visible_keys"])
def _merge_splits_kernel(
    partials, peaks, totals, out, visible_keys, heads, row_count,
    DIM: tl.constexpr, PADDED: tl.constexpr, GROUPED: tl.constexpr, MERGE_UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and query head in order, the short ones in groups of four unless GROUPED did that."""
    row, head = tl.program_id(0), tl.program_id(1)
    visible = tl.load(visible_keys + row)
    d = tl.arange(0, PADDED)
    at = (row * heads + head).to(tl.int64)
    each = row_count.to(tl.int64) * heads
    none, nothing, empty = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), d.to(tl.float32) * 0
    best, total, accumulator = none, nothing, empty
    for first_split in tl.static_range(0, 16, 4):
        top, count, values = none, nothing, empty
        for split in tl.static_range(first_split, first_split + (1 if GROUPED else 4)):
            offset, seen = at + split * each, visible > split * 64
            top, count, values = _accumulate_split(top, count, values, offset, seen, partials, peaks, totals, d, DIM)
        best, decay, new_weight = _rescale(best, top)
        total, accumulator = tl.fma(count, new_weight, total * decay), tl.fma(values, new_weight, accumulator * decay)
    for first in range(16, _num_splits(visible), MERGE_UNROLL):
        for more in tl.static_range(MERGE_UNROLL):
            offset, seen = at + (first + more) * each, visible > _split_start(first + more)
            best, total, accumulator = _accumulate_split(
                best, total, accumulator, offset, seen, partials, peaks, totals, d, DIM
            )
    accumulator = accumulator / tl.where(total == 0, 1.0, total)
    tl.store(out + at * DIM + d, accumulator.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class AttentionPlan:
    """The assignment of a step's keys to programs, and when they are loaded. No result depends on it."""

    groups_splits: bool = False  # a program reads four short splits
    single_program: bool = False  # a program reads all keys of its rows, so nothing is left to merge
    prefetches_pages: bool = False  # it loads the page numbers of the next block while it computes the current one

    @classmethod
    def of(cls, shape: StepShape, block: int, kv_heads: int, exact: bool) -> AttentionPlan:
        """Return the plan for a step of this shape with `block` keys per block.

        In float32 (`exact`) programs are compute-bound. With the widest heads (a smaller `block`) no registers are
        left. The keys of tree nodes are read in path order.
        """
        if shape.splits == NO_SPLIT or shape.path_length or exact or block != SHORT_KEYS:
            return cls(_groups_splits(shape, block, kv_heads))
        programs = shape.tiles * kv_heads
        many = programs >= MANY_PROGRAMS
        if programs >= SINGLE_PROGRAMS and shape.splits <= (MANY_SPLITS if many else SINGLE_SPLITS):
            return cls(single_program=True, prefetches_pages=not many)
        return cls(_groups_splits(shape, block, kv_heads))

    def stages(self, each: int, device: torch.device) -> int:
        """Return the pipeline stages for blocks of `each` bytes. Other shared memory is less than one stage."""
        stages = min(PREFETCH_STAGES, STAGE_BYTES // each)
        return max(STAGES, fit_stages(stages + 1, each, device) - 1) if self.prefetches_pages else STAGES


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: RowTables, scale: float, window: int | None) -> Tensor:
    """Attend q [n, heads, dim] to keys and values [pages, page_size, kv_heads, dim] -> [n, heads * dim]."""
    n, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    shape, padded = rows.shape, max(16, triton.next_power_of_2(dim))
    unsplit = shape.splits == NO_SPLIT
    block = max(16, min(128 if unsplit else SHORT_KEYS, TILE_BYTES // (padded * q.element_size())))
    exact = q.dtype == torch.float32
    tiling = AttentionTiling.of(shape.tile_height, padded, exact)
    plan = AttentionPlan.of(shape, block, kv_heads, exact)
    # Padded rows are in no tile. Merging gives zeros for them; without splits the output would stay uninitialized.
    out = (torch.zeros if unsplit else torch.empty)(n, heads * dim, dtype=q.dtype, device=q.device)
    partials = peaks = totals = out
    if merges := not unsplit and not plan.single_program:
        partials = torch.empty(shape.splits, n, heads, dim, dtype=torch.float32, device=q.device)
        peaks, totals = torch.empty(2, shape.splits, n, heads, dtype=torch.float32, device=q.device)
    splits = (grouped_splits(shape.splits) if plan.groups_splits else shape.splits) if merges else 1
    node_splits = 1 if unsplit else min(splits, 1 + triton.cdiv(shape.path_length, 64))
    stages = plan.stages(2 * block * padded * q.element_size(), q.device)
    _paged_attention_kernel[(shape.tiles * splits + shape.nodes * node_splits, kv_heads * tiling.pieces)](
        q, keys, values, partials, peaks, totals, rows.tiles,
        rows.visible_keys if plan.single_program else rows.key_limits, rows.positions, rows.paths, rows.pages,
        kv_heads * dim, heads, n, rows.pages.shape[1], shape.tiles, splits,
        scale * math.log2(math.e), GROUP=heads // kv_heads, DIM=dim, PADDED=padded, PAGE=page_size, HEIGHT=tiling.rows,
        BLOCK=block, WINDOW=window or 0, PATH_LENGTH=shape.path_length, NODE_SPLITS=node_splits, UNSPLIT=unsplit,
        GROUPED=plan.groups_splits, SINGLE_PROGRAM=plan.single_program, PREFETCH=plan.prefetches_pages, EXACT=exact,
        PIECES=tiling.pieces, num_warps=tiling.warps, num_stages=stages,
    )  # fmt: skip
    if merges:
        _merge_splits_kernel[(n, heads)](
            partials, peaks, totals, out, rows.visible_keys, heads, n,
            DIM=dim, PADDED=padded, GROUPED=plan.groups_splits, MERGE_UNROLL=MERGE_UNROLL, num_warps=1,
        )  # fmt: skip
    return out


def grouped_splits(splits: int) -> int:
    """Return the number of programs for `splits` splits when short ones are grouped by four."""
    return triton.cdiv(min(splits, SHORT_SPLITS), SPLIT_GROUP) + max(0, splits - SHORT_SPLITS)


def _groups_splits(shape: StepShape, block: int, kv_heads: int) -> bool:
    """Return whether programs read groups of short splits: if a split is one block and enough programs are left.

    The nodes of a tree share short splits one by one, so a step with trees does not group them.
    """
    if shape.splits == NO_SPLIT or shape.path_length or block != SHORT_KEYS:
        return False
    return shape.tiles * grouped_splits(shape.splits) * kv_heads * shape.tile_height >= ENOUGH_ROWS
