"""Each fused kernel of a head's draft gives what its torch function gives, and so do whole chains and trees."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
from torch import Tensor

from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.tree import MAX_WIDTH
from foretell.kernels.norm import rms_norm
from foretell.kernels.triton.draft_attention import DraftLevel, LayerKV, draft_attention
from foretell.kernels.triton.draft_sample import DraftSampling, sample_draft_tokens
from foretell.kernels.triton.eagle_inputs import NormedTable, eagle_inputs
from foretell.kernels.triton.tree_topk import DraftNoise, select_children, topk_children
from foretell.models.draft_heads import DraftHead, EagleHead, HeadConfig
from foretell.models.draft_heads.loading import pack_head
from foretell.models.quantize import CudaQuantizedLinear, quantize_linear_cuda
from foretell.runner.heads.fused_draft import FusedDraft, is_fused
from foretell.runner.heads.kv import attend
from foretell.runner.heads.sampler import (
    DraftOutput,
    ExponentialRace,
    ProbsBuffer,
    TreeTopK,
    sample_tokens,
    top_children,
)
from foretell.runner.heads.tables import WIDTH, DraftRow, DraftShape, DraftTable
from foretell.types import Budget
from tests.heads.test_single_graph import LONG, both, waiting
from tests.kernels_triton.test_forward import DEVICE
from tests.tiny import HEADS, LAYER, tiny_decoder

FUSED = {name: HEADS[name] for name in ("eagle of two layers", "eagle with a window")}


# With a device all heads are drafted for by these kernels in `tests/gpu`.
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="the sequences of these tests are on a CPU")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def table_for(temperatures: list[float], depth: int, wide: int = 0, own: int = 1) -> DraftTable:
    """Return a table with one sequence per temperature."""
    table = DraftTable(
        DraftShape(len(temperatures), 256, depth, wide, any(temperatures)), 1 + (depth - 1) * max(1, wide), 4, DEVICE
    )
    noise = [np.arange(depth) * 7919 + 31 * i for i in range(len(temperatures))]
    table.upload(
        [
            DraftRow(1, 5, 4, [0, 1], own, temperature, keys)
            for temperature, keys in zip(temperatures, noise, strict=True)
        ]
    )
    return table


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.0, 0.0, 0.0], [0.8], [0.0, 1.3, 0.0, 0.5]], ids=str)
@pytest.mark.parametrize("outputs", [24, 300, 9000])
def test_a_token_is_that_of_the_definition(outputs: int, temperatures: list[float]) -> None:
    table, depth = table_for(temperatures, 3), 2
    ids = torch.arange(outputs, device=DEVICE) * 3 + 1
    logits = random(len(temperatures), outputs) * 3
    logits[0, 5] = logits[0, 17] = logits.max() + 1  # of equals the first
    output = [torch.empty(2, 3, len(temperatures), device=DEVICE) for _ in range(2)]
    defined, mine = (DraftOutput(each, ProbsBuffer(outputs, DEVICE)(table.shape)) for each in output)
    truth = sample_tokens(logits, ExponentialRace(table, ids), defined, depth)
    tokens = torch.empty_like(truth)
    draw = (
        None if mine.probs is None else DraftSampling(table.temperatures, table.noise_keys[:, depth], mine.probs[depth])
    )
    sample_draft_tokens(logits, ids, draw, tokens, mine.readback[:, depth])
    assert tokens.tolist() == truth.tolist() == mine.readback[0, depth].tolist()
    torch.testing.assert_close(mine.readback[1, depth], defined.readback[1, depth], rtol=1e-5, atol=1e-7)
    if mine.probs is not None and defined.probs is not None:
        torch.testing.assert_close(mine.probs[depth], defined.probs[depth], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("picks", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_what_is_read_is_that_of_the_definition(dtype: torch.dtype, picks: bool, scale: float) -> None:
    width, n, eps = 48, 3, 1e-5
    table, features = random(20, width, dtype=dtype), random(9, width, seed=1, dtype=dtype)
    left, right = random(width, seed=2, dtype=dtype), random(width, seed=3, dtype=dtype)
    rows = torch.tensor([[7, 5], [0, 8], [19, 2]], device=DEVICE)  # columns of a table, as those of the drafts are
    tokens, before = rows[:, 0], rows[:, 1] if picks else None
    source = features if before is None else features[before]
    embedded = table[tokens] if scale == 1.0 else table[tokens] * scale
    normed = rms_norm(source[:n], right, eps)
    truth = torch.cat([rms_norm(embedded, left, eps), normed], -1)
    for keeps in (False, True):
        found, residual = eagle_inputs(
            NormedTable(table, tokens, left), NormedTable(features, before, right), scale, eps, keeps
        )
        torch.testing.assert_close(found, truth)
        torch.testing.assert_close(residual, normed if keeps else source[:n])


def columns_of(pages: Tensor, own: Tensor, cache: Tensor) -> Tensor:
    """[sequences, columns, kv_heads, dim]: the context, then the draft."""
    return torch.cat([cache[pages].flatten(1, 2), own], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 6, 2])
@pytest.mark.parametrize(("dim", "part"), [(24, 16), (64, 128)])  # a device compiles them quite differently
@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (1, 3), (4, 3), (10, 1)])
def test_draft_attention_equals_the_definition(
    rows: int, depth: int, dim: int, part: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.kernels.triton.draft_attention.SPLIT_KEYS", part)
    page, kv_heads, share, wide, num_drafts = 4, 2, 3, rows, 20
    table = torch.tensor([[40, 9, 5, 3, 8, 0, 1, 2, 10, 4], [11, 1, 4, 6, 7, 2, 3, 0, 9, 5]], device=DEVICE)
    places, pages = table[:, 0], table[:, 1:]
    places.copy_(torch.tensor([33, 2]))
    keys, values = (random(12, page, kv_heads, dim, seed=i, dtype=dtype) for i in (1, 2))
    own = [random(2, num_drafts, kv_heads, dim, seed=i, dtype=dtype) for i in (3, 4)]
    q = random(2 * rows, kv_heads * share, dim, seed=5, dtype=dtype)
    first = 0 if depth == 0 else 1 + (depth - 1) * wide
    draft_index, columns = torch.arange(num_drafts, device=DEVICE), pages.shape[1] * page
    ways = (random(2 * rows, num_drafts, seed=6) > 0) & (draft_index < first)
    ways |= draft_index == first + torch.arange(rows, device=DEVICE).repeat(2)[:, None]
    shown = ways if rows > 1 else (draft_index < first + rows).expand(2 * rows, -1)
    place = torch.arange(columns, device=DEVICE)
    text = ((place >= 1) & (place < places[:, None]))[:, None].expand(-1, rows, -1)
    near = draft_index >= 0
    if window is not None:
        text = text & (place > places[:, None, None] + depth - window)
        near = depth - (draft_index + wide - 1) // wide < window
    seen = torch.cat([text, shown.view(2, rows, -1) & near], -1)
    bias = torch.zeros(seen.shape, dtype=dtype, device=DEVICE).masked_fill(~seen, float("-inf"))
    whole = [columns_of(pages, mine, cache) for mine, cache in zip(own, (keys, values), strict=True)]
    truth = attend(q, whole[0], whole[1], bias, LAYER)
    sight = DraftLevel(places, pages, columns, rows, first, depth, wide, ways.to(torch.int8) if rows > 1 else None)
    found = draft_attention(q, LayerKV(keys, values), LayerKV(*own), sight, LAYER.scale, window)
    near_enough = 1e-4 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found.view(truth.shape), truth, rtol=near_enough, atol=near_enough)


@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [0.8, 1.3], [0.6, 0.0], [0.01, 1e-9]], ids=str)
@pytest.mark.parametrize(("outputs", "count"), [(24, 10), (3000, 10), (1024, 3), (2050, 10)])
def test_the_children_are_those_of_the_definition(outputs: int, count: int, temperatures: list[float]) -> None:
    seqs, rows, wide, depth = len(temperatures), 3, 4, 2
    table, ids = table_for(temperatures, 3), torch.arange(outputs, device=DEVICE) * 2
    logits = random(seqs * rows, outputs) * 2
    output = torch.zeros(2, seqs, wide, count, device=DEVICE)
    topk_children(logits, ids, noise_of(table, depth), output[0], output[1])
    tokens, shares = top_children(
        logits.view(seqs, rows, -1), ExponentialRace(table, ids), depth, table.shape.sampled, count
    )
    is_likely = shares > 0  # any token will do where the probability is 0
    assert torch.equal(output[0, :, :rows][is_likely], tokens.float()[is_likely])
    torch.testing.assert_close(output[1, :, :rows], shares, rtol=1e-5, atol=1e-8)
    assert not output[:, :, rows:].any()


def noise_of(table: DraftTable, depth: int) -> DraftNoise | None:
    return DraftNoise(table.temperatures, table.noise_keys[:, depth]) if table.shape.sampled else None


def test_of_equal_children_the_first_are_taken() -> None:
    logits = torch.full((1, 2500), -3.0, device=DEVICE)
    logits[0, [7, 1030, 2400]] = 1.0
    logits[0, [3, 5]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    output = torch.zeros(2, 1, 1, 8, device=DEVICE)
    topk_children(logits, torch.arange(2500, device=DEVICE), None, output[0], output[1])
    assert output[0, 0, 0].tolist() == [7, 1030, 2400, 3, 5, 0, 1, 2]


def test_noise_decides_between_equal_logits() -> None:
    """However cold it is: of many that are as likely the race decides, also between parts of the outputs."""
    logits = torch.full((1, 2500), -30.0, device=DEVICE)
    logits[0, [7, 900, 1030, 2100, 2400]] = 20.0
    ids = torch.arange(2500, device=DEVICE)
    for temperature in (1e-5, 0.01, 1.0):
        table, output = table_for([temperature], 1), torch.zeros(2, 1, 1, 4, device=DEVICE)
        topk_children(logits, ids, noise_of(table, 0), output[0], output[1])
        tokens, shares = top_children(logits[None], ExponentialRace(table, ids), 0, True, 4)
        assert output[0].tolist() == tokens.tolist() and len(set(shares[0, 0].tolist())) == 4
        torch.testing.assert_close(output[1], shares, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("own", [1, 2, 5])
@pytest.mark.parametrize("equals", [False, True])
def test_the_branches_are_those_of_the_definition(own: int, equals: bool) -> None:
    seqs, wide, count, depth, outputs = 2, 5, 6, 4, 30
    table = table_for([0.0] * seqs, depth, wide, own)
    ids = torch.arange(outputs, device=DEVICE)
    choice, above = TreeTopK(table, ids, count), None
    seen = torch.zeros(seqs, 1, table.draft_rows, dtype=torch.bool, device=DEVICE)
    seen[..., 0] = True
    for level in range(depth - 1):
        rows = 1 if above is None else wide
        logits = random(seqs * rows, outputs, seed=level) * 2
        choice.add_level(logits.round() if equals else logits)
        output, first = choice.output[level].clone(), 1 + level * wide
        tokens, parents = choice.expand()
        above = select_children(output, table.field(WIDTH), above, first, table.draft_rows)
        assert torch.equal(output, choice.output[level]) and torch.equal(above.path_probs, choice.path_probs)
        assert above.tokens.tolist() == tokens.tolist()
        hung = parents + torch.arange(seqs, device=DEVICE)[:, None] * rows
        assert above.parent_rows.tolist() == hung.flatten().tolist()
        itself = torch.arange(table.draft_rows, device=DEVICE) == first + torch.arange(wide, device=DEVICE)[:, None]
        seen = seen.gather(1, parents[..., None].expand(-1, -1, table.draft_rows)) | itself
        assert torch.equal(above.ancestors.bool().view_as(seen), seen)


def fused(drafter: HeadDrafter) -> HeadDrafter:
    """Return the same drafter with the fused kernels."""
    mine: Any = drafter
    keys, values, states = mine.pages.caches
    assert is_fused(mine.head, keys, states)
    mine._graph = FusedDraft(mine.head, keys, values, states, MAX_WIDTH)
    return drafter


@interpreted
@pytest.mark.parametrize("config", FUSED.values(), ids=FUSED)
def test_a_single_graph_draft_equals_the_definition(config: HeadConfig) -> None:
    drafters, seqs = waiting(config)
    fused(drafters[1])
    both(drafters, seqs, [Budget(3)] * len(LONG), slice(1, 2))
    both(drafters, seqs, [Budget(5 + 2 * i, max_depth=3) for i in range(len(LONG))], slice(1, 3))


@interpreted
def test_a_sampled_draft_matches_too() -> None:
    drafters, seqs = waiting(HEADS["eagle"], temperatures=(0.0, 1.3, 0.7))
    fused(drafters[1])
    both(drafters, seqs, [Budget(3)] * len(LONG), slice(0, 3))
    both(drafters, seqs, [Budget(9, max_depth=3)] * len(LONG), slice(0, 3))


def test_other_heads_are_not_served() -> None:
    for name in ("eagle 1", "mtp", "distilled"):
        drafter: Any = waiting(HEADS[name])[0][1]
        assert not is_fused(drafter.head, drafter.pages.keys, drafter.pages.hidden_state_cache)


def in_8_bits(monkeypatch: pytest.MonkeyPatch, *heads: DraftHead[Any]) -> None:
    """As they are packed for a GPU, with all that is multiplied by rows."""
    monkeypatch.setattr(
        "foretell.models.draft_heads.loading._head_packer",
        lambda *_: functools.partial(quantize_linear_cuda, format="int8"),
    )
    for head in heads:
        pack_head(head, tiny_decoder())
        assert isinstance(head, EagleHead) and isinstance(head.fc, CudaQuantizedLinear)


@interpreted
def test_an_int8_head_matches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    drafters, seqs = waiting(HEADS["eagle of two layers"])
    in_8_bits(monkeypatch, *(drafter.head for drafter in drafters))
    fused(drafters[1])
    both(drafters, seqs, [Budget(2)] * len(LONG), slice(1, 2))
    both(drafters, seqs, [Budget(5 + 2 * i, max_depth=3) for i in range(len(LONG))], slice(1, 3))
