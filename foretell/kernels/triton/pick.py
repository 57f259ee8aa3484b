# mypy: ignore-errors
"""The likeliest token of a row, how sure the model is of it, and the row that runs it next."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .choose import first_of_largest
from .tables import RowTables

BLOCK = 8192  # as many as registers hold: a program waits for memory once for each block
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # what is forbidden weighs as much: differences stay numbers

# Read and written number by number, at places that hang on the sizes: they need no kernels of their own.
SINGLE = (
    "tokens_out", "sure_out", "last", "positions", "pages", "ends",
    "tokens", "next_positions", "slots", "limits", "reaches", "wanted", "tiles",
)  # fmt: skip


@triton.jit
def _likeliest(scores, vocab, BLOCK: tl.constexpr):
    """The first token of the largest score, and its share of the whole. Lanes go by themselves and meet at the end."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # of a lane, over its own best
    place = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        less = tl.exp(-tl.abs(tl.maximum(x, NOTHING) - tl.maximum(best, NOTHING)))
        total = tl.where(x > best, total * less + 1.0, total + less)
        place = tl.where(x > best, begin + i, place)
        best = tl.maximum(best, x)
    high, token = first_of_largest(best, place)
    return token, 1.0 / tl.sum(total * tl.exp(tl.maximum(best, NOTHING) - tl.maximum(high, NOTHING)), 0)


@triton.jit(do_not_specialize_on_alignment=SINGLE)
def _pick(
    logits, tokens_out, sure_out, last, positions, pages, ends, stride, vocab, most_pages,
    tokens, next_positions, slots, limits, reaches, wanted, tiles, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    seq = tl.program_id(0)
    token, sure = _likeliest(logits + seq.to(tl.int64) * stride, vocab, BLOCK)
    tl.store(tokens_out + seq, token.to(tl.float32))
    tl.store(sure_out + seq, sure)
    position = tl.load(positions + tl.load(last + seq)) + 1
    runs = position < tl.load(ends + seq)
    page = tl.load(pages + seq * most_pages + position // PAGE, mask=runs, other=0)
    tl.store(tokens + seq, token)
    tl.store(next_positions + seq, position)  # where it does not run it stays behind the end
    tl.store(slots + seq, tl.where(runs, page * PAGE + position % PAGE, -1))
    tl.store(limits + seq, position + 1)
    tl.store(reaches + seq, tl.where(runs, position + 1, 0))
    tl.store(wanted + seq, seq)
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

    `found` may lie in pinned memory of the host. `following` becomes the tables of the rows that run these tokens; a
    sequence whose next place is not before its end runs no more.
    """
    block = max(64, min(BLOCK, triton.next_power_of_2(vocab)))
    _pick[(len(logits),)](
        logits, found[0], found[1], rows.wanted, rows.positions, rows.pages, ends, logits.stride(0), vocab,
        rows.pages.shape[1], following.tokens, following.positions, following.slots, following.limits,
        following.reaches, following.wanted, following.tiles, PAGE=page_size, BLOCK=block,
        num_warps=16 if block == BLOCK else 4,
    )  # fmt: skip
