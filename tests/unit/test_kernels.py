"""Kernels equal their definitions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foretell.kernels.attention import FOLD_ROWS, AttentionLayout, Span, attend, group_spans
from foretell.kernels.linear import linear, onednn_linear, pack_onednn
from foretell.kernels.norm import rms_norm
from foretell.kernels.rotary import rotate
from foretell.kernels.store import store
from foretell.kv.cache import slots_of
from foretell.models.config import Rope
from foretell.models.rope import rope_table

HEADS, KV_HEADS, DIM, SIZE, PAGES = 4, 2, 8, 4, 64


def naive(queries: Tensor, keys: Tensor, values: Tensor, spans: list[Span], window: int | None) -> Tensor:
    """Compute attention one row at a time, with the keys visible to it."""
    out = torch.empty(len(queries), HEADS * DIM)
    for span in spans:
        slots = slots_of(span.pages, SIZE, 0, span.stop)
        for row in range(span.rows):
            seen, position = visible(span, row)
            seen = [key for key in seen if window is None or positions(span)[key] > position - window]
            k = keys.view(-1, KV_HEADS, DIM)[[slots[key] for key in seen]]
            v = values.view(-1, KV_HEADS, DIM)[[slots[key] for key in seen]]
            q = queries[span.first + row]
            for head in range(HEADS):
                scores = (k[:, head // (HEADS // KV_HEADS)] @ q[head]) * 0.3
                mixed = scores.softmax(0) @ v[:, head // (HEADS // KV_HEADS)]
                out[span.first + row, head * DIM : (head + 1) * DIM] = mixed
    return out


def positions(span: Span) -> list[int]:
    nodes = len(span.parents)
    root = span.stop - nodes - 1
    depths: list[int] = []
    for parent in span.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [*range(span.stop - nodes), *(root + depth for depth in depths)]


def visible(span: Span, row: int) -> tuple[list[int], int]:
    """Return the keys visible to a row, and its position."""
    key = span.start + row
    first_node = span.stop - len(span.parents)
    if key < first_node:
        return list(range(key + 1)), key
    node, ancestors = key - first_node, []
    while node >= 0:
        ancestors.append(first_node + node)
        node = span.parents[node]
    return [*range(first_node), *reversed(ancestors)], positions(span)[key]


def random_spans(rng: random.Random, rows: list[int], trees: bool) -> list[Span]:
    free = list(range(PAGES))
    rng.shuffle(free)
    spans, first = [], 0
    for count in rows:
        start = rng.randrange(0, 20)
        pages = tuple(free.pop() for _ in range(-(-(start + count) // SIZE)))
        parents = tuple(rng.randrange(-1, i) for i in range(count - 1)) if trees and rng.random() < 0.7 else ()
        spans.append(Span(first, count, start, pages, parents))
        first += count
    return spans


CASES = [[1], [1, 1, 1], [5], [3, 3], [1, 4, 1, 4], [FOLD_ROWS + 8], [FOLD_ROWS + 3, 1, 2, 1], [7, 7, 2, 7]]


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("rows", CASES, ids=str)
def test_attention_equals_its_definition(rows: list[int], trees: bool, window: int | None) -> None:
    rng = random.Random(str((rows, trees, window)))
    torch.manual_seed(len(rows))
    keys, values = torch.randn(2, PAGES, SIZE, KV_HEADS, DIM).unbind()
    for _ in range(4):
        spans = random_spans(rng, rows, trees)
        queries = torch.randn(sum(rows), HEADS, DIM)
        groups = group_spans(spans, AttentionLayout(SIZE, HEADS // KV_HEADS, frozenset({window}), torch.float32))
        fast = attend(queries, keys, values, groups, 0.3, window)
        torch.testing.assert_close(fast, naive(queries, keys, values, spans, window), rtol=1e-4, atol=1e-5)


def test_adjacent_pages_are_read_in_place() -> None:
    layout = AttentionLayout(SIZE, 2, frozenset({None}), torch.float32)
    (group,) = group_spans([Span(0, 1, 9, (5, 6, 7))], layout)
    assert group.pages == slice(5, 8)
    (group,) = group_spans([Span(0, 1, 9, (5, 7, 6))], layout)
    assert isinstance(group.pages, Tensor)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 64])
def test_packed_linear_equals_linear(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(96, 40), torch.randn(rows, 40)
    add = torch.randn(96) if bias else None
    packed = pack_onednn(weight)
    if packed is None:
        pytest.skip("no packed layout on this machine")
    torch.testing.assert_close(onednn_linear(x, packed, add), linear(x, weight, add), rtol=1e-4, atol=1e-4)


def test_rms_norm_equals_its_formula() -> None:
    x, weight = torch.randn(3, 4, 16), torch.randn(16)
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), wanted)


def test_rope_rotates_pairs_by_their_angle() -> None:
    x = torch.randn(5, 2, DIM)
    table = rope_table(Rope(theta=100.0), DIM, 50)[[0, 3, 7, 8, 49]]
    rotated = rotate(x, table[:, :1], table[:, 1:])
    for row, position in enumerate([0, 3, 7, 8, 49]):
        for i in range(DIM // 2):
            angle = torch.tensor(position * 100.0 ** (-2 * i / DIM))
            a, b = x[row, :, i], x[row, :, i + DIM // 2]
            torch.testing.assert_close(rotated[row, :, i], a * angle.cos() - b * angle.sin(), rtol=1e-4, atol=1e-5)
            half = rotated[row, :, i + DIM // 2]
            torch.testing.assert_close(half, a * angle.sin() + b * angle.cos(), rtol=1e-4, atol=1e-5)


def test_store_writes_each_row_to_its_slot() -> None:
    cache, new = torch.zeros(3, SIZE, KV_HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    store(new, cache, torch.tensor([9, 2]))
    assert cache[2, 1].equal(new[0])
    assert cache[0, 2].equal(new[1])
    assert cache.count_nonzero() == new.count_nonzero()


def test_group_padding_never_reads_nan() -> None:
    """Masked keys are multiplied too; a cache initialized with zeros keeps them finite."""
    keys = torch.zeros(PAGES, SIZE, KV_HEADS, DIM)
    spans = [Span(0, 1, 0, (1,)), Span(1, 1, 6, (2, 3))]
    groups = group_spans(spans, AttentionLayout(SIZE, 2, frozenset({None}), torch.float32))
    assert attend(torch.randn(2, HEADS, DIM), keys, keys, groups, 1.0, None).isfinite().all()
