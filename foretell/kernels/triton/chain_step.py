# mypy: ignore-errors
"""A row's token, the likeliest or one that is drawn, how sure the model is of it, and the row that runs it next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_tables import RowTables
from .sample import BLOCK as RACING
from .sample import DIGITS, drawn, first_of_largest

BLOCK = 8192  # as many as registers hold: a program waits for memory once for each block
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # what is forbidden weighs as much: differences stay numbers

# Read and written number by number, at places that hang on the sizes: they need no kernels of their own.
SINGLE = (
    "words", "settings", "tokens_out", "sure_out", "last", "positions", "pages", "ends",
    "tokens", "next_positions", "slots", "limits", "reaches", "wanted", "tiles",
)  # fmt: skip


@triton.jit
def _likeliest(scores, vocab, coolness, BLOCK: tl.constexpr):
    """The largest score, the first token that has it, and what all weigh against that one, differences taken times
    `coolness`. Lanes go by themselves and meet at the end."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # of a lane, over its own best
    place = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        less = tl.exp(-tl.abs(tl.maximum(x, NOTHING) - tl.maximum(best, NOTHING)) * coolness)
        total = tl.where(x > best, total * less + 1.0, total + less)
        place = tl.where(x > best, begin + i, place)
        best = tl.maximum(best, x)
    high, token = first_of_largest(best, place)
    less = tl.exp((tl.maximum(best, NOTHING) - tl.maximum(high, NOTHING)) * coolness)
    return high, token, tl.sum(total * less, 0)


@triton.jit
def _by_settings(scores, vocab, words, settings, row, BLOCK: tl.constexpr, RACING: tl.constexpr, DIGITS: tl.constexpr):
    """The token of a row, drawn where its temperature is above 0, and its share at that temperature. It is one of all
    tokens: where top-k, top-p or min-p leave some out, the token was drawn with a larger one."""
    warmth = tl.load(settings + row * 6 + 2)
    coolness = 1.0 / tl.where(warmth > 0, warmth, 1.0)
    peak, token, total = _likeliest(scores, vocab, coolness, BLOCK)
    share = 1.0 / total
    if warmth > 0:
        token = drawn(scores, vocab, peak, words, settings, row, RACING, DIGITS)
        share *= tl.exp((tl.load(scores + token).to(tl.float32) - peak) * coolness)
    return token, share


@triton.jit(do_not_specialize_on_alignment=SINGLE)
def _pick(
    logits, words, settings, tokens_out, sure_out, last, positions, pages, ends, stride, vocab, most_pages,
    tokens, next_positions, slots, limits, reaches, wanted, tiles,
    PAGE: tl.constexpr, DRAWS: tl.constexpr, BLOCK: tl.constexpr, RACING: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    seq = tl.program_id(0)
    scores = logits + seq.to(tl.int64) * stride
    if DRAWS:
        token, sure = _by_settings(scores, vocab, words, settings, seq, BLOCK, RACING, DIGITS)
    else:
        _, token, total = _likeliest(scores, vocab, 1.0, BLOCK)
        sure = 1.0 / total
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
    logits: Tensor,
    rows: RowTables,
    ends: Tensor,
    following: RowTables,
    found: Tensor,
    page_size: int,
    settings: Tensor | None = None,
) -> None:
    """Of logits [sequences, vocab] a token each, and how sure that is, to found [2, sequences]: the likeliest, or where
    there are `settings` [sequences, FIELDS] what `choose_tokens` chooses by them.

    `found` may lie in pinned memory of the host. `following` becomes the tables of the rows that run these tokens; a
    sequence whose next place is not before its end runs no more.
    """
    vocab = logits.shape[1]
    block = max(64, min(BLOCK, triton.next_power_of_2(vocab)))
    words, floats = (ends, ends) if settings is None else (settings, settings.view(torch.float32))
    _pick[(len(logits),)](
        logits, words, floats, found[0], found[1], rows.wanted, rows.positions, rows.pages, ends, logits.stride(0),
        vocab, rows.pages.shape[1], following.tokens, following.positions, following.slots, following.limits,
        following.reaches, following.wanted, following.tiles, PAGE=page_size, DRAWS=settings is not None,
        BLOCK=block, RACING=min(block, RACING), DIGITS=DIGITS, num_warps=16 if block == BLOCK else 4,
    )  # fmt: skip
