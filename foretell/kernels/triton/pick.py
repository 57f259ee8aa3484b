# mypy: ignore-errors
"""The likeliest token of a row, how sure the model is of it, and the row that runs it next."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .tables import RowTables

BLOCK = 4096


@triton.jit
def _pick(
    logits, tokens_out, sure_out, last, positions, pages, ends, stride, vocab, most_pages,
    tokens, next_positions, slots, limits, reaches, tiles, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    seq = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    token = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        scores = tl.load(logits + seq.to(tl.int64) * stride + begin + i, mask=begin + i < vocab, other=float("-inf"))
        scores = scores.to(tl.float32)
        high, place = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        higher = tl.maximum(best, high)
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(scores - higher), 0)
        token = tl.where(high > best, begin + place, token)  # of equals the first
        best = higher
    tl.store(tokens_out + seq, token.to(tl.float32))
    tl.store(sure_out + seq, 1 / total)
    position = tl.load(positions + tl.load(last + seq)) + 1
    runs = position < tl.load(ends + seq)
    page = tl.load(pages + seq * most_pages + position // PAGE, mask=runs, other=0)
    tl.store(tokens + seq, token)
    tl.store(next_positions + seq, position)  # where it does not run it stays behind the end
    tl.store(slots + seq, tl.where(runs, page * PAGE + position % PAGE, -1))
    tl.store(limits + seq, position + 1)
    tl.store(reaches + seq, tl.where(runs, position + 1, 0))
    tl.store(tiles + seq * 6, seq)
    tl.store(tiles + seq * 6 + 1, 1)
    tl.store(tiles + seq * 6 + 2, seq)
    tl.store(tiles + seq * 6 + 3, tl.where(runs, position + 1, 0))
    tl.store(tiles + seq * 6 + 4, 0)
    tl.store(tiles + seq * 6 + 5, position + 1)


def pick_next(
    logits: Tensor, vocab: int, rows: RowTables, ends: Tensor, following: RowTables, found: Tensor, page_size: int
) -> None:
    """Of logits [sequences, .] the likeliest of the first `vocab`, and how sure that is, to found [2, sequences].

    `following` becomes the tables of the rows that run these tokens; a sequence whose next place is not before its
    end runs no more.
    """
    _pick[(len(logits),)](
        logits, found[0], found[1], rows.wanted, rows.positions, rows.pages, ends, logits.stride(0), vocab,
        rows.pages.shape[1], following.tokens, following.positions, following.slots, following.limits,
        following.reaches, following.tiles, PAGE=page_size, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
