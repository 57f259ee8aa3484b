# mypy: ignore-errors
"""Attention of a draft head: over the context in its pages and over the draft tokens so far, which lie in a buffer.

The context is divided into splits that programs read in parallel; the draft is one more split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_limits import AttentionTiling

SPLIT_KEYS = 128  # keys that one program reads; more where there would be over MAX_SPLITS programs
MAX_SPLITS = 32
TILE_BYTES = 8192  # upper bound of the keys that a program loads at once


# Specializing on these would compile a kernel for every draft length and every context length.
@triton.jit(
    do_not_specialize=[
        "first", "depth", "rows", "num_drafts", "width", "split_size", "splits", "position_stride", "page_stride"
    ],
    do_not_specialize_on_alignment=["positions", "pages", "ancestors"],
)  # fmt: skip
def _draft_attention_kernel(
    q, keys, values, own_keys, own_values, positions, pages, ancestors, out, lse,
    position_stride, page_stride, key_stride, heads, first, depth, rows, num_drafts, width, split_size, splits, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Attend rows of one sequence, for one KV head, to one split of the context or to the draft."""
    split, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, HEIGHT)
    if PIECES > 1:
        head, m = head // PIECES, head % PIECES * HEIGHT + m
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK)
    row = seq * rows + m // GROUP
    row_valid = m < rows * GROUP
    at = (row * heads + head * GROUP + m % GROUP).to(tl.int64)
    valid = d < DIM
    query = tl.load(q + at[None, :] * DIM + d[:, None], mask=row_valid[None, :] & valid[:, None], other=0.0)
    best = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    accumulator = tl.zeros([PADDED, HEIGHT], tl.float32)
    # One loop serves context and draft, which lie in different tensors. Values are loaded after the first product, as
    # in `attention.py`: loaded before it, in 16 bits, Triton 3.6 generated reads outside of shared memory.
    in_context = split < splits
    position = tl.load(positions + seq * position_stride).to(tl.int32)
    start = tl.where(in_context, split * split_size, 0)
    stop = tl.where(in_context, tl.minimum(split * split_size + split_size, position), first + rows)
    first_visible = tl.where(in_context, 1, 0)  # position 0 has no hidden state before it, so a head keeps no KV for it
    key_source, value_source = tl.where(in_context, keys, own_keys), tl.where(in_context, values, own_values)
    for begin in range(start, stop, BLOCK):
        key = begin + n
        is_draft = key >= tl.where(in_context, stop, 0)
        inside = (key < stop) & (key >= first_visible)
        if WINDOW > 0:
            back = tl.where(in_context, position - key, -((key + width - 1) // width))  # for a draft token: its level
            inside = inside & (back + depth < WINDOW)
        page = tl.load(pages + seq * page_stride + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = tl.where(in_context, page * PAGE + key % PAGE, (seq * num_drafts + key).to(tl.int64))
        offset = slot * key_stride + head * DIM
        k = tl.load(key_source + offset[:, None] + d[None, :], mask=inside[:, None] & valid[None, :], other=0.0)
        seen = inside[:, None] & row_valid[None, :]
        if TREE:
            offsets = row[None, :] * num_drafts + key[:, None]
            is_ancestor = tl.load(ancestors + offsets, mask=seen & is_draft[:, None], other=1)
            seen = seen & (is_ancestor != 0)
        scores = tl.dot(k, query, input_precision="ieee" if EXACT else None) * scale  # in base 2
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0))
        max_score = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(scores - max_score[None, :])
        decay = tl.exp2(best - max_score)
        v = tl.load(value_source + offset[None, :] + d[:, None], mask=inside[None, :] & valid[:, None], other=0.0)
        accumulator = accumulator * decay[None, :]
        accumulator = tl.dot(v, weight.to(v.dtype), accumulator, input_precision="ieee" if EXACT else None)
        best, total = new_best, total * decay + tl.sum(weight, 0)
    total = tl.where(total == 0, 1.0, total)  # a row that sees no key here has best = -inf
    at += split.to(tl.int64) * tl.num_programs(2) * rows * heads
    tl.store(lse + at, best + tl.log2(total), mask=row_valid)
    tl.store(
        out + at[None, :] * DIM + d[:, None], accumulator / total[None, :], mask=row_valid[None, :] & valid[:, None]
    )


@triton.jit(do_not_specialize=["splits", "row_count"])
def _merge_draft_splits_kernel(
    partials, lse, out, heads, row_count, splits,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and query head by their log-sum-exp. A row always sees its own key."""
    at = (tl.program_id(0) * heads + tl.program_id(1)).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    d = tl.arange(0, PADDED)
    offset = at + split.to(tl.int64) * row_count * heads
    log = tl.load(lse + offset, mask=split < splits, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    held = (split < splits)[:, None] & (d < DIM)[None, :]
    partial = tl.load(partials + offset[:, None] * DIM + d[None, :], mask=held, other=0.0)
    accumulator = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + at * DIM + d, accumulator.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer: [pages, page_size, kv_heads, dim] or [sequences, draft tokens, kv_heads, dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class DraftLevel:
    """The keys that the rows of one tree level attend to."""

    positions: Tensor  # [sequences]: context length; keys before it are in the pages
    pages: Tensor  # [sequences, pages]
    max_positions: int  # upper bound of `positions`
    rows: int  # per sequence
    first: int  # index of the level's first draft token
    depth: int
    width: int  # draft tokens of a level after the first
    ancestors: Tensor | None = None  # [sequences * rows, draft tokens], int8: tree mask; None: all are visible


def draft_attention(
    q: Tensor, context: LayerKV, draft: LayerKV, level: DraftLevel, scale: float, window: int | None
) -> Tensor:
    """Attend q [sequences * rows, heads, dim] to `context` and `draft` -> [sequences * rows, heads * dim].

    `draft` already holds the keys and values of the rows themselves.
    """
    n, heads, dim = q.shape
    num_seqs, num_drafts, kv_heads, _ = draft.keys.shape
    padded, queries_per_kv_head = max(16, triton.next_power_of_2(dim)), heads // kv_heads
    split_size = max(SPLIT_KEYS, triton.cdiv(level.max_positions, MAX_SPLITS))
    splits = triton.cdiv(level.max_positions, split_size)
    exact = q.dtype == torch.float32
    tiling = AttentionTiling.of(level.rows * queries_per_kv_head, padded, exact)
    block = max(16, min(SPLIT_KEYS, TILE_BYTES // (padded * q.element_size())))
    partials = torch.empty(splits + 1, n, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits + 1, n, heads, dtype=torch.float32, device=q.device)
    _draft_attention_kernel[(splits + 1, kv_heads * tiling.pieces, num_seqs)](
        q, context.keys, context.values, draft.keys, draft.values, level.positions, level.pages,
        q if level.ancestors is None else level.ancestors, partials, lse,
        level.positions.stride(0), level.pages.stride(0), kv_heads * dim, heads, level.first, level.depth,
        level.rows, num_drafts, level.width, split_size, splits, scale * math.log2(math.e),
        GROUP=queries_per_kv_head, DIM=dim, PADDED=padded, PAGE=context.keys.shape[1],
        HEIGHT=tiling.rows, BLOCK=block, WINDOW=window or 0, TREE=level.ancestors is not None, EXACT=exact,
        PIECES=tiling.pieces, num_warps=tiling.warps, num_stages=2,
    )  # fmt: skip
    out = torch.empty(n, heads * dim, dtype=q.dtype, device=q.device)
    _merge_draft_splits_kernel[(n, heads)](
        partials, lse, out, heads, n, splits + 1,
        DIM=dim, PADDED=padded, SPLITS_PADDED=triton.next_power_of_2(max(MAX_SPLITS // 4, splits + 1)), num_warps=1,
    )  # fmt: skip
    return out
