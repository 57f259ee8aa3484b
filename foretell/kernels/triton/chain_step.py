# mypy: ignore-errors
"""One step of a draft chain on the device: pick a token and its confidence, and set up the row that runs it next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_tables import RowTables
from .sample import BLOCK as RACE_BLOCK
from .sample import DIGITS, first_argmax, sample_row

BLOCK = 8192  # logits in registers at once; a program waits for memory once per block
MASKED_LOGIT: tl.constexpr = tl.constexpr(-1e30)  # stands for -inf, so that differences are finite

# Accessed element by element at offsets that depend on the sizes: no need to specialize on their alignment.
SCALAR_ACCESS = (
    "setting_words", "settings", "tokens_out", "confidences_out", "logit_rows", "positions", "pages", "page_ends",
    "tokens", "next_positions", "slots", "key_limits", "visible_keys", "next_logit_rows", "tiles",
)  # fmt: skip


@triton.jit
def _argmax_and_sum(scores, vocab, inverse_temperature, BLOCK: tl.constexpr):
    """Return the largest score, its first index and the softmax denominator relative to it.

    Each lane keeps a running maximum and sum (online softmax); the lanes are combined at the end.
    """
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # per lane, relative to its own maximum
    index = i
    for begin in range(0, vocab, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < vocab, other=float("-inf")).to(tl.float32)
        decay = tl.exp(-tl.abs(tl.maximum(x, MASKED_LOGIT) - tl.maximum(best, MASKED_LOGIT)) * inverse_temperature)
        total = tl.where(x > best, total * decay + 1.0, total + decay)
        index = tl.where(x > best, begin + i, index)
        best = tl.maximum(best, x)
    high, token = first_argmax(best, index)
    decay = tl.exp((tl.maximum(best, MASKED_LOGIT) - tl.maximum(high, MASKED_LOGIT)) * inverse_temperature)
    return high, token, tl.sum(total * decay, 0)


@triton.jit
def _sample_with_confidence(
    scores, vocab, setting_words, settings, row, BLOCK: tl.constexpr, RACE_BLOCK: tl.constexpr, DIGITS: tl.constexpr
):
    """Return the token of a row, sampled if its temperature is above 0, and its probability at that temperature.

    The probability is over all tokens: top-k, top-p and min-p are not applied to it.
    """
    temperature = tl.load(settings + row * 6 + 2)
    inverse_temperature = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    peak, token, total = _argmax_and_sum(scores, vocab, inverse_temperature, BLOCK)
    confidence = 1.0 / total
    if temperature > 0:
        token = sample_row(scores, vocab, peak, setting_words, settings, row, RACE_BLOCK, DIGITS)
        confidence *= tl.exp((tl.load(scores + token).to(tl.float32) - peak) * inverse_temperature)
    return token, confidence


@triton.jit(do_not_specialize_on_alignment=SCALAR_ACCESS)
def _chain_step_kernel(
    logits, setting_words, settings, tokens_out, confidences_out, logit_rows, positions, pages, page_ends,
    stride, vocab, most_pages,
    tokens, next_positions, slots, key_limits, visible_keys, next_logit_rows, tiles,
    PAGE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, RACE_BLOCK: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Sample a draft token of one sequence and write the inputs of its next draft step."""
    seq = tl.program_id(0)
    scores = logits + seq.to(tl.int64) * stride
    if SAMPLES:
        token, confidence = _sample_with_confidence(
            scores, vocab, setting_words, settings, seq, BLOCK, RACE_BLOCK, DIGITS
        )
    else:
        _, token, total = _argmax_and_sum(scores, vocab, 1.0, BLOCK)
        confidence = 1.0 / total
    tl.store(tokens_out + seq, token.to(tl.float32))
    tl.store(confidences_out + seq, confidence)
    position = tl.load(positions + tl.load(logit_rows + seq)) + 1
    is_running = position < tl.load(page_ends + seq)
    page = tl.load(pages + seq * most_pages + position // PAGE, mask=is_running, other=0)
    tl.store(tokens + seq, token)
    tl.store(next_positions + seq, position)  # a finished sequence stays past its end
    tl.store(slots + seq, tl.where(is_running, page * PAGE + position % PAGE, -1))
    tl.store(key_limits + seq, position + 1)
    tl.store(visible_keys + seq, tl.where(is_running, position + 1, 0))
    tl.store(next_logit_rows + seq, seq)
    tl.store(tiles + seq * 6, seq)
    tl.store(tiles + seq * 6 + 1, 1)
    tl.store(tiles + seq * 6 + 2, seq)
    tl.store(tiles + seq * 6 + 3, tl.where(is_running, position + 1, 0))
    tl.store(tiles + seq * 6 + 4, 0)
    tl.store(tiles + seq * 6 + 5, position + 1)


def chain_step(
    logits: Tensor,
    rows: RowTables,
    page_ends: Tensor,
    next_rows: RowTables,
    out: Tensor,
    page_size: int,
    settings: Tensor | None = None,
) -> None:
    """Pick one token per row of logits [sequences, vocab] and write it and its confidence to `out` [2, sequences].

    It is the argmax or, with `settings` [sequences, FIELDS], what `sample_tokens` samples. `out` may be pinned host
    memory. `next_rows` becomes the tables of the rows that run these tokens; a sequence whose next position is not
    before its `page_ends` stops.
    """
    vocab = logits.shape[1]
    block = max(64, min(BLOCK, triton.next_power_of_2(vocab)))
    setting_words, floats = (page_ends, page_ends) if settings is None else (settings, settings.view(torch.float32))
    _chain_step_kernel[(len(logits),)](
        logits, setting_words, floats, out[0], out[1], rows.logit_rows, rows.positions, rows.pages, page_ends,
        logits.stride(0),
        vocab, rows.pages.shape[1], next_rows.tokens, next_rows.positions, next_rows.slots, next_rows.key_limits,
        next_rows.visible_keys, next_rows.logit_rows, next_rows.tiles, PAGE=page_size, SAMPLES=settings is not None,
        BLOCK=block, RACE_BLOCK=min(block, RACE_BLOCK), DIGITS=DIGITS, num_warps=16 if block == BLOCK else 4,
    )  # fmt: skip
