# mypy: ignore-errors
"""The input of an EAGLE head's first layer: token embedding and previous hidden state, normalized and concatenated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm import rms_norm_row


@triton.jit
def _store_embedding(
    tokens, embedding, weights, inputs, row, token_stride, width, scale, eps, BLOCK: tl.constexpr, SCALED: tl.constexpr
):
    """Store the normalized embedding, the left half of one row."""
    i = tl.arange(0, BLOCK)
    valid = i < width
    dtype = inputs.dtype.element_ty
    token = tl.load(tokens + row * token_stride).to(tl.int64)
    value = tl.load(embedding + token * width + i, mask=valid, other=0.0).to(dtype).to(tl.float32)
    if SCALED:
        value = (value * scale).to(dtype).to(tl.float32)
    weight = tl.load(weights + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(inputs + row * 2 * width + i, rms_norm_row(value, weight, width, eps).to(dtype), mask=valid)


@triton.jit(
    do_not_specialize=["token_stride", "source_stride"], do_not_specialize_on_alignment=["tokens", "source_rows"]
)
def _eagle_inputs_kernel(
    tokens, embedding, embed_weight, hidden_states, source_rows, hidden_weight, inputs, residual,
    token_stride, source_stride, width, scale, eps,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, SELECTS_ROWS: tl.constexpr, RESIDUAL_NORMED: tl.constexpr,
):  # fmt: skip
    """Store one half of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    valid = i < width
    dtype = inputs.dtype.element_ty
    if tl.program_id(1) == 0:
        _store_embedding(tokens, embedding, embed_weight, inputs, row, token_stride, width, scale, eps, BLOCK, SCALED)
    else:
        source = tl.load(source_rows + row * source_stride).to(tl.int64) if SELECTS_ROWS else row
        hidden = tl.load(hidden_states + source * width + i, mask=valid, other=0.0).to(dtype)
        weight = tl.load(hidden_weight + i, mask=valid, other=0.0).to(tl.float32)
        normed = rms_norm_row(hidden.to(tl.float32), weight, width, eps).to(dtype)
        tl.store(inputs + row * 2 * width + width + i, normed, mask=valid)
        if RESIDUAL_NORMED:
            tl.store(residual + row * width + i, normed, mask=valid)
        else:
            tl.store(residual + row * width + i, hidden, mask=valid)


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots", "source_rows"])
def _store_eagle_inputs_kernel(
    tokens, embedding, embed_weight, fresh, cache, slots, source_rows, hidden_weight, inputs, width, scale, eps,
    BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store one half of one row. Values stored by this launch are not read back: they may not be visible yet."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    valid = i < width
    if tl.program_id(1) == 0:
        _store_embedding(tokens, embedding, embed_weight, inputs, row, 1, width, scale, eps, BLOCK, SCALED)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        previous_slot = tl.load(slots + tl.maximum(row - 1, 0)).to(tl.int64)  # row 0: its own, which is checked last
        source_slot = tl.load(source_rows + row).to(tl.int64)
        own = fresh + row * width
        if slot >= 0:
            tl.store(cache + slot * width + i, tl.load(own + i, mask=valid, other=0.0), mask=valid)
        source = tl.where(source_slot == previous_slot, own - width, cache + source_slot * width)
        source = tl.where(source_slot == slot, own, source)
        hidden = tl.load(source + i, mask=valid, other=0.0).to(tl.float32)
        weight = tl.load(hidden_weight + i, mask=valid, other=0.0).to(tl.float32)
        normed = rms_norm_row(hidden, weight, width, eps).to(inputs.dtype.element_ty)
        tl.store(inputs + row * 2 * width + width + i, normed, mask=valid)


@dataclass(frozen=True)
class NormedTable:
    """Rows of a table with the weight of their RMS norm; `rows` [n] selects some, None takes all."""

    table: Tensor  # [rows, width]
    rows: Tensor | None
    weight: Tensor  # [width]


def eagle_inputs(
    embedded: NormedTable, hidden: NormedTable, embed_scale: float, eps: float, residual_normed: bool
) -> tuple[Tensor, Tensor]:
    """Return the inputs [n, 2 * width] and the residual [n, width]: the hidden state, normed if `residual_normed`."""
    tokens, source_rows = embedded.rows, hidden.rows
    n, width, like = len(tokens), embedded.table.shape[1], hidden.weight
    inputs = torch.empty(n, 2 * width, dtype=like.dtype, device=like.device)
    residual = torch.empty(n, width, dtype=like.dtype, device=like.device)
    block = triton.next_power_of_2(width)
    _eagle_inputs_kernel[(n, 2)](
        tokens, embedded.table, embedded.weight, hidden.table,
        tokens if source_rows is None else source_rows, hidden.weight, inputs, residual, tokens.stride(0),
        1 if source_rows is None else source_rows.stride(0), width, embed_scale, eps,
        BLOCK=block, SCALED=embed_scale != 1.0, SELECTS_ROWS=source_rows is not None, RESIDUAL_NORMED=residual_normed,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return inputs, residual


@dataclass(frozen=True)
class NewHiddenStates:
    """Hidden states of new positions, in order, and the cache they go to.

    Each is stored in its slot, -1 for none. A row reads the one in slot `source_rows`, which is in the cache unless it
    is that of the row above or its own.
    """

    fresh: Tensor  # [n, width]
    cache: Tensor  # [slots, width]
    slots: Tensor  # [n]
    source_rows: Tensor  # [n], slots


def store_eagle_inputs(
    embedded: NormedTable, states: NewHiddenStates, hidden_weight: Tensor, embed_scale: float, eps: float
) -> Tensor:
    """Store all hidden states in the cache and return the inputs [n, 2 * width], as `eagle_inputs` would after it."""
    n, width = states.fresh.shape
    inputs = torch.empty(n, 2 * width, dtype=hidden_weight.dtype, device=hidden_weight.device)
    block = triton.next_power_of_2(width)
    _store_eagle_inputs_kernel[(n, 2)](
        embedded.rows, embedded.table, embedded.weight, states.fresh, states.cache, states.slots, states.source_rows,
        hidden_weight, inputs, width, embed_scale, eps,
        BLOCK=block, SCALED=embed_scale != 1.0, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return inputs
