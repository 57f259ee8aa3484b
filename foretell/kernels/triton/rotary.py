# mypy: ignore-errors
"""Queries and keys normed where the model does so and turned; keys and values go to their slots on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_tables import Places

HEADS = 8  # heads a program turns


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _turn(
    qkv, q_weight, k_weight, turns, positions, slots, q, keys, values, heads, kv_heads, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, the two halves of each side by side; every step rounded as its definition rounds it."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, PADDED)
    half = (i < HALF)[None, :]
    query = (head < heads)[:, None]
    key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    value = (head >= heads + kv_heads)[:, None]
    real = (head < heads + 2 * kv_heads)[:, None] & half
    source = qkv + (row * (heads + 2 * kv_heads) + head)[:, None] * DIM + i[None, :]
    left = tl.load(source, mask=real, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    old_left, old_right = left, right
    if NORMS:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)[:, None]
        q_left = tl.load(q_weight + i, mask=i < HALF, other=0.0)[None, :]
        k_left = tl.load(k_weight + i, mask=i < HALF, other=0.0)[None, :]
        q_right = tl.load(q_weight + HALF + i, mask=i < HALF, other=0.0)[None, :]
        k_right = tl.load(k_weight + HALF + i, mask=i < HALF, other=0.0)[None, :]
        left = _rounded(left * scale * tl.where(query, q_left, k_left).to(tl.float32), qkv)
        right = _rounded(right * scale * tl.where(query, q_right, k_right).to(tl.float32), qkv)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.where(slot >= 0, tl.load(positions + row), 0)  # a row that only fills up may stand anywhere
    around = turns + position.to(tl.int64) * 2 * DIM + i
    cos_left = tl.load(around, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(around + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(around + DIM, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(around + DIM + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    kind = qkv.dtype.element_ty
    new_left = (_rounded(left * cos_left, qkv) + _rounded(right * sin_left, qkv)).to(kind)
    new_right = (_rounded(right * cos_right, qkv) + _rounded(left * sin_right, qkv)).to(kind)
    target = q + (row * heads + head)[:, None] * DIM + i[None, :]
    tl.store(target, new_left, mask=real & query)
    tl.store(target + HALF, new_right, mask=real & query)
    target = keys + (slot * kv_heads + head - heads)[:, None] * DIM + i[None, :]
    stored = real & (slot + head * 0 >= 0)[:, None]
    tl.store(target, new_left, mask=stored & key)
    tl.store(target + HALF, new_right, mask=stored & key)
    target = values + (slot * kv_heads + head - heads - kv_heads)[:, None] * DIM + i[None, :]
    tl.store(target, old_left.to(kind), mask=stored & value)
    tl.store(target + HALF, old_right.to(kind), mask=stored & value)


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the norms of queries and keys, [dim] each."""

    queries: Tensor
    keys: Tensor
    eps: float


def turn_and_store(
    qkv: Tensor, turns: Tensor, rows: Places, keys: Tensor, values: Tensor, norms: HeadNorms | None = None
) -> Tensor:
    """qkv [n, (heads + 2 kv_heads) * dim]: the queries, turned, [n, heads, dim]; keys and values go into the cache.

    `turns` [context, 2, dim] are cosines and sines by position, the sines' first half negated.
    """
    kv_heads, dim = keys.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    weights = (qkv, qkv) if norms is None else (norms.queries, norms.keys)
    _turn[(len(qkv), triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv, *weights, turns, rows.positions, rows.slots, q, keys, values, heads, kv_heads,
        0.0 if norms is None else norms.eps,
        DIM=dim, HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), HEADS=HEADS, NORMS=norms is not None,
        num_warps=2,
    )  # fmt: skip
    return q
