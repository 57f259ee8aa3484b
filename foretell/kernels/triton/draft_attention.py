# mypy: ignore-errors
"""Attention of what a head guesses: over the text in its pages, and over the guesses on the way, which lie apart.

The text is cut into parts that are read side by side; the guesses are one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_limits import Cut

PART = 128  # places of text that one program reads; more where there would be too many programs
MOST_PARTS = 32
TILE_BYTES = 8192  # of keys that a program looks at at once, at most


# Sizes of drafts are no constants: else each number of guesses and each length of text would be compiled for.
@triton.jit(
    do_not_specialize=[
        "first", "depth", "rows", "guesses", "wide", "part_size", "parts", "place_stride", "page_stride"
    ],
    do_not_specialize_on_alignment=["places", "pages", "ways"],
)  # fmt: skip
def _glance(
    q, keys, values, own_keys, own_values, places, pages, ways, out, logs,
    place_stride, page_stride, key_stride, heads, first, depth, rows, guesses, wide, part_size, parts, scale,
    SHARE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, WAYS: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All rows of one text, or some of them, under one key head, over one part of its places or over the guesses."""
    part, head, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, HEIGHT)
    if PIECES > 1:
        head, m = head // PIECES, head % PIECES * HEIGHT + m
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK)
    row = text * rows + m // SHARE
    own = m < rows * SHARE
    at = (row * heads + head * SHARE + m % SHARE).to(tl.int64)
    real = d < DIM
    query = tl.load(q + at[None, :] * DIM + d[:, None], mask=own[None, :] & real[:, None], other=0.0)
    best = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    mixed = tl.zeros([PADDED, HEIGHT], tl.float32)
    # One loop for both, though they read from different places. Values are asked for behind the first product, as in
    # `attention.py`: before it, in 16 bits, Triton 3.6 made code that reads shared memory where there is none.
    of_text = part < parts
    place = tl.load(places + text * place_stride).to(tl.int32)
    start = tl.where(of_text, part * part_size, 0)
    stop = tl.where(of_text, tl.minimum(part * part_size + part_size, place), first + rows)
    hidden = tl.where(of_text, 1, 0)  # a text's first place has no feature before it
    key_source, value_source = tl.where(of_text, keys, own_keys), tl.where(of_text, values, own_values)
    for begin in range(start, stop, BLOCK):
        key = begin + n
        guessed = key >= tl.where(of_text, stop, 0)
        inside = (key < stop) & (key >= hidden)
        if WINDOW > 0:
            back = tl.where(of_text, place - key, -((key + wide - 1) // wide))  # of a guess: its level
            inside = inside & (back + depth < WINDOW)
        page = tl.load(pages + text * page_stride + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = tl.where(of_text, page * PAGE + key % PAGE, (text * guesses + key).to(tl.int64))
        where = slot * key_stride + head * DIM
        k = tl.load(key_source + where[:, None] + d[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        seen = inside[:, None] & own[None, :]
        if WAYS:
            on_way = tl.load(ways + row[None, :] * guesses + key[:, None], mask=seen & guessed[:, None], other=1)
            seen = seen & (on_way != 0)
        scores = tl.dot(k, query, input_precision="ieee" if EXACT else None) * scale  # in powers of two
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - level[None, :])
        fade = tl.exp2(best - level)
        v = tl.load(value_source + where[None, :] + d[:, None], mask=inside[None, :] & real[:, None], other=0.0)
        mixed = tl.dot(v, weight.to(v.dtype), mixed * fade[None, :], input_precision="ieee" if EXACT else None)
        best, total = higher, total * fade + tl.sum(weight, 0)
    total = tl.where(total == 0, 1.0, total)  # a row that sees nothing here: its best is -inf
    at += part.to(tl.int64) * tl.num_programs(2) * rows * heads
    tl.store(logs + at, best + tl.log2(total), mask=own)
    tl.store(out + at[None, :] * DIM + d[:, None], mixed / total[None, :], mask=own[None, :] & real[:, None])


@triton.jit(do_not_specialize=["parts", "row_count"])
def _together(
    pieces, logs, out, heads, row_count, parts,
    DIM: tl.constexpr, PADDED: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """The parts of one row under one query head, weighed by what they hold; the row itself is always seen."""
    at = (tl.program_id(0) * heads + tl.program_id(1)).to(tl.int64)
    part = tl.arange(0, FILLED)
    d = tl.arange(0, PADDED)
    place = at + part.to(tl.int64) * row_count * heads
    log = tl.load(logs + place, mask=part < parts, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    held = (part < parts)[:, None] & (d < DIM)[None, :]
    piece = tl.load(pieces + place[:, None] * DIM + d[None, :], mask=held, other=0.0)
    mixed = tl.sum(piece * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + at * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class Cells:
    """Keys and values of one layer, [pages, page_size, kv_heads, dim], or [texts, guesses, kv_heads, dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Sight:
    """What the rows of a level see: `rows` of each text, which stand from the guess `first` on, so deep."""

    places: Tensor  # [texts]: places of each before this are its text
    pages: Tensor  # [texts, pages]
    columns: int  # the most places of a text
    rows: int
    first: int
    depth: int
    wide: int  # guesses of a level behind the first
    ways: Tensor | None = None  # [texts * rows, guesses] in int8, which are seen; None: all


def glance(q: Tensor, text: Cells, own: Cells, sight: Sight, scale: float, window: int | None) -> Tensor:
    """q [texts * rows, heads, dim] -> [texts * rows, heads * dim]; the rows' own keys are in place already."""
    n, heads, dim = q.shape
    texts, guesses, kv_heads, _ = own.keys.shape
    padded, share = max(16, triton.next_power_of_2(dim)), heads // kv_heads
    each = max(PART, triton.cdiv(sight.columns, MOST_PARTS))
    parts = triton.cdiv(sight.columns, each)
    exact = q.dtype == torch.float32
    cut = Cut.of(sight.rows * share, padded, exact)
    block = max(16, min(PART, TILE_BYTES // (padded * q.element_size())))
    pieces = torch.empty(parts + 1, n, heads, dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(parts + 1, n, heads, dtype=torch.float32, device=q.device)
    _glance[(parts + 1, kv_heads * cut.pieces, texts)](
        q, text.keys, text.values, own.keys, own.values, sight.places, sight.pages,
        q if sight.ways is None else sight.ways, pieces, logs,
        sight.places.stride(0), sight.pages.stride(0), kv_heads * dim, heads, sight.first, sight.depth,
        sight.rows, guesses, sight.wide, each, parts, scale * math.log2(math.e),
        SHARE=share, DIM=dim, PADDED=padded, PAGE=text.keys.shape[1],
        HEIGHT=cut.rows, BLOCK=block, WINDOW=window or 0, WAYS=sight.ways is not None, EXACT=exact, PIECES=cut.pieces,
        num_warps=cut.warps, num_stages=2,
    )  # fmt: skip
    out = torch.empty(n, heads * dim, dtype=q.dtype, device=q.device)
    _together[(n, heads)](
        pieces, logs, out, heads, n, parts + 1,
        DIM=dim, PADDED=padded, FILLED=triton.next_power_of_2(max(MOST_PARTS // 4, parts + 1)), num_warps=1,
    )  # fmt: skip
    return out
