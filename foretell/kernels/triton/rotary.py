# mypy: ignore-errors
"""RoPE and the optional query/key norm in one kernel, which also stores keys and values in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_tables import RowPositions

HEADS_PER_PROGRAM = 8  # heads per program


@triton.jit
def _round_to(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate_and_store_kernel(
    qkv, q_weight, k_weight, rope_table, positions, slots, q, keys, values, heads, kv_heads, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Process some heads of one row as two halves, rounding after each step as the torch definition does."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    i = tl.arange(0, PADDED)
    half = (i < HALF)[None, :]
    query = (head < heads)[:, None]
    key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    value = (head >= heads + kv_heads)[:, None]
    valid = (head < heads + 2 * kv_heads)[:, None] & half
    source = qkv + (row * (heads + 2 * kv_heads) + head)[:, None] * DIM + i[None, :]
    left = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
    old_left, old_right = left, right
    if NORMS:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)[:, None]
        q_left = tl.load(q_weight + i, mask=i < HALF, other=0.0)[None, :]
        k_left = tl.load(k_weight + i, mask=i < HALF, other=0.0)[None, :]
        q_right = tl.load(q_weight + HALF + i, mask=i < HALF, other=0.0)[None, :]
        k_right = tl.load(k_weight + HALF + i, mask=i < HALF, other=0.0)[None, :]
        left = _round_to(left * scale * tl.where(query, q_left, k_left).to(tl.float32), qkv)
        right = _round_to(right * scale * tl.where(query, q_right, k_right).to(tl.float32), qkv)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.where(slot >= 0, tl.load(positions + row), 0)  # the position of a padded row is arbitrary
    rope_row = rope_table + position.to(tl.int64) * 2 * DIM + i
    cos_left = tl.load(rope_row, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(rope_row + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(rope_row + DIM, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(rope_row + DIM + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    dtype = qkv.dtype.element_ty
    new_left = (_round_to(left * cos_left, qkv) + _round_to(right * sin_left, qkv)).to(dtype)
    new_right = (_round_to(right * cos_right, qkv) + _round_to(left * sin_right, qkv)).to(dtype)
    target = q + (row * heads + head)[:, None] * DIM + i[None, :]
    tl.store(target, new_left, mask=valid & query)
    tl.store(target + HALF, new_right, mask=valid & query)
    target = keys + (slot * kv_heads + head - heads)[:, None] * DIM + i[None, :]
    stored = valid & (slot + head * 0 >= 0)[:, None]
    tl.store(target, new_left, mask=stored & key)
    tl.store(target + HALF, new_right, mask=stored & key)
    target = values + (slot * kv_heads + head - heads - kv_heads)[:, None] * DIM + i[None, :]
    tl.store(target, old_left.to(dtype), mask=stored & value)
    tl.store(target + HALF, old_right.to(dtype), mask=stored & value)


@dataclass(frozen=True)
class QKNorms:
    """Weights of the query and key norms, [dim] each."""

    queries: Tensor
    keys: Tensor
    eps: float


def rotate_and_store(
    qkv: Tensor, rope_table: Tensor, rows: RowPositions, keys: Tensor, values: Tensor, norms: QKNorms | None = None
) -> Tensor:
    """Rotate the queries and keys of qkv [n, (heads + 2 kv_heads) * dim] and store keys and values in the cache.

    Return the queries, [n, heads, dim]. `rope_table` [context, 2, dim] holds cosines and sines by position, the first
    half of the sines negated.
    """
    kv_heads, dim = keys.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    weights = (qkv, qkv) if norms is None else (norms.queries, norms.keys)
    _rotate_and_store_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
        qkv, *weights, rope_table, rows.positions, rows.slots, q, keys, values, heads, kv_heads,
        0.0 if norms is None else norms.eps,
        DIM=dim, HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        NORMS=norms is not None,
        num_warps=2,
    )  # fmt: skip
    return q
