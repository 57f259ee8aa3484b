"""The CUDA executor's forward equals its definition: any mix of rows, trees, windows, norms and page sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.attention import AttentionLayout, group_spans
from foretell.kernels.attention import attend as attend_by_torch
from foretell.kernels.triton import attention
from foretell.kernels.triton.attention import AttentionPlan, attend
from foretell.kernels.triton.row_tables import NO_SPLIT, RowTables, StepShape, num_splits
from foretell.kv.cache import KVCache
from foretell.models.config import ModelConfig, Rope
from foretell.models.decoder import Decoder
from foretell.runner.batch_layout import BatchLayout, pack
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import step_shape
from foretell.runner.cuda.tables import PageTable, make_tiles, write_tables
from foretell.runner.executor import EagerExecutor
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence
from tests.tiny import tiny_decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASE = ModelConfig(vocab=32, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=40, context=2048)
CONFIGS = {
    "three to a head": replace(BASE, layers=1, heads=6, head_dim=16),
    "windows": replace(BASE, windows=(5, None)),
    "all norms": replace(
        BASE, kv_heads=1, qk_norm=True, sandwich_norms=True, embed_scale=5.6, activation="gelu_tanh", tied=False,
        qkv_bias=True,
    ),
    "multipliers": replace(
        BASE, residual_scale=0.3, logit_scale=0.5, logit_softcap=3.0, ropes=(Rope(), Rope(kind="none")),
    ),
}  # fmt: skip
TREE = Draft((1, 2, 3, 4, 5, 6), (-1, -1, 0, 0, 1, 3))
ROOM = 2400  # tokens of a cache


def share_of(number: int, start: int, take: int, draft: Draft, page_size: int, pages: list[int]) -> ScheduledSequence:
    """A sequence with `start` cached tokens of which `take` more and the draft are to run, on the next of `pages`."""
    tokens = [(7 * i + number) % 32 for i in range(start + take)]
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, start)
    seq.pages = [pages.pop() for _ in range(-(-(start + take + len(draft)) // page_size))]
    return ScheduledSequence.of(seq, take)


def step(shapes: list[tuple[int, int, Draft]], page_size: int, room: int = ROOM) -> BatchLayout:
    pages = [int(page) for page in np.random.default_rng(0).permutation(room // page_size)]
    shares = [share_of(i, start, take, draft, page_size, pages) for i, (start, take, draft) in enumerate(shapes)]
    return pack(shares, [draft for _, _, draft in shapes], page_size)


def world(
    config: ModelConfig, page_size: int, dtype: torch.dtype, seed: int = 0, room: int = ROOM
) -> tuple[Decoder, KVCache, AttentionLayout]:
    """A decoder and a cache full of an earlier life's keys."""
    model = tiny_decoder(seed, config).to(DEVICE, dtype)
    model.prepare(config.context)
    cache = KVCache(model.layer_shapes, room // page_size, page_size, dtype, DEVICE)
    torch.manual_seed(1 + seed)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape).to(dtype))
    return (
        model,
        cache,
        AttentionLayout(page_size, config.heads // config.kv_heads, frozenset(config.windows), dtype, DEVICE),
    )


def run(
    model: Decoder, cache: KVCache, packed: BatchLayout, sizes: StepShape, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The step as the executor runs it when nothing is recorded."""
    most = sizes.tile_height // (model.config.heads // model.config.kv_heads)
    tiles = make_tiles(packed, most, unsplit=sizes.splits == NO_SPLIT)
    numbers = np.full(sizes.table_size, -77, np.int32)  # what an earlier step left
    write_tables(numbers, packed, tiles, sizes)
    pages = PageTable(len(packed.spans), 400, DEVICE).update(packed.spans)
    rows = RowTables.over(torch.from_numpy(numbers).to(DEVICE), sizes, pages)
    with torch.inference_mode():
        logits, features = CudaForward(model, cache)(rows, rows.logit_rows, taps)
    assert features is not None
    return logits[: len(packed.logits_indices)].float(), features[: packed.rows]


def exact_fit(packed: BatchLayout, share: int, whole: bool = False) -> StepShape:
    """As `fit`, for the very keys there are: the interpreter runs every program of a grid."""
    sizes, tiles = step_shape(packed, share)
    if whole:
        tiles = make_tiles(packed, 16 // share, unsplit=True)
        return replace(sizes, rows=packed.rows, tiles=len(tiles.shared), tile_height=16, splits=NO_SPLIT)
    return replace(sizes, splits=num_splits(max(span.stop for span in packed.spans)))


def compare(
    config: ModelConfig, packed: BatchLayout, page_size: int, dtype: torch.dtype, whole: bool, within: float
) -> None:
    model, cache, layout = world(config, page_size, dtype)
    sizes = exact_fit(packed, layout.queries_per_kv_head, whole)
    mine, features = run(model, cache, packed, sizes, (1, config.layers))
    fast = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    model, cache, layout = world(config, page_size, dtype)
    with torch.inference_mode():
        output = EagerExecutor(model, cache, layout).forward(packed, (1, config.layers))
    assert output.hidden_states is not None
    torch.testing.assert_close(mine, output.logits, rtol=within, atol=within)
    torch.testing.assert_close(features, output.hidden_states, rtol=within, atol=within)
    for quick, plain in zip(fast, (*cache.keys, *cache.values), strict=True):
        torch.testing.assert_close(quick, plain, rtol=within, atol=within)


STEPS: dict[str, list[tuple[int, int, Draft]]] = {
    "one row each": [(0, 1, Draft()), (130, 1, Draft())],
    "chains": [(140, 1, Draft.chain([3, 4, 5])), (3, 1, Draft.chain([9]))],
    "trees": [(127, 1, TREE), (5, 2, Draft.chain([3])), (9, 1, Draft())],
    "prompts": [(0, 13, Draft()), (12, 4, Draft())],
    "trees in whole": [(127, 1, TREE), (9, 1, Draft())],
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_forward_equals_its_definition(config: ModelConfig, name: str) -> None:
    compare(config, step(STEPS[name], 4), 4, torch.float32, name in ("prompts", "trees in whole"), 2e-4)


def test_long_contexts_are_cut_where_parts_grow() -> None:
    packed = step([(1100, 1, Draft.chain([3, 4]))], 8)
    compare(replace(BASE, layers=1, kv_heads=1), packed, 8, torch.float32, False, 2e-4)


def test_half_precision() -> None:
    compare(CONFIGS["three to a head"], step(STEPS["trees"], 4), 4, torch.float16, False, 2e-2)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, in a batch, padded to other shapes."""
    config = CONFIGS["three to a head"]
    shapes = [(100, 1, Draft.chain([3, 4])), (17, 1, Draft()), (270, 1, Draft())]
    results = []
    for some in (shapes[:1], shapes):
        packed = step(some, 4)
        model, cache, _ = world(config, 4, torch.float32)
        sizes = exact_fit(packed, 3)
        logits, _ = run(model, cache, packed, replace(sizes, tiles=2 * sizes.tiles), (1,))
        results.append(logits[:3])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def attended(
    cache: KVCache,
    packed: BatchLayout,
    q: Tensor,
    window: int | None,
    height: int = 16,
    scale: float = 0.3,
    more: int = 0,
) -> Tensor:
    """Attention of a step's rows over a first layer's keys and values; `more`: what tables have beyond them."""
    share = q.shape[1] // cache.keys[0].shape[2]
    tiles = make_tiles(packed, height // share)
    sizes = replace(exact_fit(packed, share), tile_height=height, tiles=len(tiles.shared) + more)
    sizes = replace(sizes, rows=sizes.rows + 5 * more, splits=sizes.splits + more)
    numbers = np.full(sizes.table_size, -77, np.int32)
    write_tables(numbers, packed, tiles, sizes)
    pages = PageTable(len(packed.spans), 800, DEVICE).update(packed.spans)
    rows = RowTables.over(torch.from_numpy(numbers).to(DEVICE), sizes, pages)
    filled = torch.zeros(sizes.rows, *q.shape[1:], dtype=q.dtype, device=DEVICE)
    filled[: len(q)] = q
    found = attend(filled, cache.keys[0], cache.values[0], rows, scale, window)
    assert not found[packed.rows :].any(), "padded rows are zero"
    return found[: len(q)]


@pytest.mark.parametrize("start", [5, 127, 128, 250])
@pytest.mark.parametrize("window", [None, 4, 131])
def test_a_node_sees_what_its_path_as_a_chain_would_see_bit_for_bit(window: int | None, start: int) -> None:
    config = CONFIGS["three to a head"]
    tree = step([(start, 1, TREE)], 4)
    q = torch.randn(7, config.heads, config.head_dim, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    _, cache, _ = world(config, 4, torch.float32)
    found = attended(cache, tree, q, window)
    slots = tree.table[2]  # of the last token, and of the nodes
    for path in ((1, 4), (0, 3, 5), (0, 2)):
        _, cache, _ = world(config, 4, torch.float32)
        rows = [0, *(1 + node for node in path)]
        for kept in (cache.keys[0].flatten(0, 1), cache.values[0].flatten(0, 1)):
            kept[slots[: len(rows)]] = kept[slots[rows]]
        chain = step([(start, 1, Draft.chain([TREE.tokens[node] for node in path]))], 4)
        assert (chain.table[2] == slots[: len(rows)]).all()
        assert torch.equal(attended(cache, chain, q[rows], window), found[rows])


def follow(monkeypatch: pytest.MonkeyPatch, way: AttentionPlan) -> None:
    """Have attention go this way, whatever the sizes."""
    monkeypatch.setattr(AttentionPlan, "of", lambda *_: way)


WAYS = {
    "by four": AttentionPlan(groups_splits=True),
    "alone": AttentionPlan(single_program=True),
    "alone, ahead": AttentionPlan(single_program=True, prefetches_pages=True),
}
WORLDS: dict[str, list[tuple[int, int, Draft]]] = {
    "short": [(1, 1, Draft()), (40, 1, Draft.chain([3, 4])), (0, 1, Draft.chain([3] * 8))],
    "600 keys": [(600, 1, Draft.chain([5] * 6)), (250, 1, Draft.chain([5])), (63, 1, Draft())],
    "1024 keys, one row": [(1023, 1, Draft())],
    "1100 keys": [(1100, 1, Draft.chain([3, 4])), (511, 1, Draft.chain([3]))],
    "4500 keys": [(4700, 1, Draft.chain([3, 4])), (64, 1, Draft()), (4094, 1, Draft.chain([5] * 3))],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 90, 300])
@pytest.mark.parametrize("name", WORLDS)
def test_split_assignment_and_prefetching_change_no_bit(
    name: str, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program that reads four short splits or all keys, or the merge kernel. In float32 no rounding hides another
    order. What was not written is no number."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16")
    if DEVICE.type == "cpu" and (dtype == torch.float16 and window or name == "4500 keys" and window == 90):
        pytest.skip("the interpreter takes its time, and other cases have these windows")
    config = replace(BASE, heads=3, kv_heads=1, head_dim=64)
    room = 9600
    packed = step(WORLDS[name], 16, room)
    q = torch.randn(packed.rows, config.heads, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    _, cache, _ = world(config, 16, dtype, room=room)
    monkeypatch.setattr(attention.torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    follow(monkeypatch, AttentionPlan())
    wanted = attended(cache, packed, q, window)
    assert wanted.isfinite().all()
    for label, way in WAYS.items():
        follow(monkeypatch, way)
        assert torch.equal(attended(cache, packed, q, window, more=3 if way.single_program else 0), wanted), label


@pytest.mark.parametrize("page_size", [4, 64])
def test_pages_of_any_size_are_known_ahead(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BASE, heads=6, head_dim=64)
    packed = step([(330, 1, Draft.chain([3, 4])), (130, 1, Draft())], page_size)
    q = torch.randn(packed.rows, config.heads, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    _, cache, _ = world(config, page_size, torch.float32)
    follow(monkeypatch, AttentionPlan())
    wanted = attended(cache, packed, q, None)
    for way in WAYS.values():
        follow(monkeypatch, way)
        assert torch.equal(attended(cache, packed, q, None), wanted)


def test_which_way_is_gone() -> None:
    """Few rows share the keys, more read by four, and where tiles suffice each reads all of its own."""
    few, some = StepShape(1, 1, 16, 8), StepShape(64, 8, 32, 16)
    assert AttentionPlan.of(few, 64, 21, False) == AttentionPlan()
    assert AttentionPlan.of(some, 64, 21, False) == AttentionPlan(single_program=True, prefetches_pages=True)
    assert AttentionPlan.of(replace(some, tiles=32), 64, 21, False) == AttentionPlan(single_program=True)
    assert AttentionPlan.of(replace(some, splits=20), 64, 21, False) == AttentionPlan(groups_splits=True)
    assert AttentionPlan.of(replace(some, tiles=32, splits=20), 64, 21, False) == AttentionPlan(single_program=True)
    assert AttentionPlan.of(replace(some, tiles=32, splits=40), 64, 21, False) == AttentionPlan(groups_splits=True)
    assert AttentionPlan.of(replace(few, splits=40), 64, 21, False) == AttentionPlan()
    assert AttentionPlan.of(replace(some, path_length=32, nodes=8), 64, 21, False) == AttentionPlan()
    assert AttentionPlan.of(replace(some, splits=NO_SPLIT), 128, 21, False) == AttentionPlan()
    assert AttentionPlan.of(some, 64, 21, True) == AttentionPlan(groups_splits=True)
    assert AttentionPlan.of(replace(some, tiles=256), 32, 21, False) == AttentionPlan()


def test_stages_leave_room_for_a_second_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PREFETCH_STAGES", 4)
    ahead, device = AttentionPlan(single_program=True, prefetches_pages=True), torch.device("cpu")
    assert [ahead.stages(kib * 1024, device) for kib in (16, 32, 64)] == [4, 3, 2]
    assert AttentionPlan(single_program=True).stages(16 * 1024, device) == attention.STAGES


def test_how_many_rows_a_tile_has_changes_no_bit_in_float32() -> None:
    """Its programs have as many each, whatever it has."""
    config = CONFIGS["three to a head"]
    packed = step([(20, 1, Draft.chain([3] * 12))], 4)
    q = torch.randn(13, config.heads, config.head_dim, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    _, cache, _ = world(config, 4, torch.float32)
    low, high = (attended(cache, packed, q, None, height) for height in (16, 64))
    assert torch.equal(low, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256] if DEVICE.type == "cuda" else [256])
def test_attention_errs_by_two_roundings_and_no_more(dim: int, dtype: torch.dtype) -> None:
    """One is that of the result. The other is that of the weights, which are multiplied in the model's type: values are
    independent of each other here, so it is as large. Many numbers are compared and no layer makes errors larger, so
    both are known well."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16")
    config, packed = replace(BASE, heads=6, head_dim=dim), step([(90, 1, TREE)], 8)
    q = torch.randn(7, config.heads, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    _, cache, layout = world(config, 8, dtype)
    exact = [tensor.double() for tensor in (q, cache.keys[0], cache.values[0])]
    groups = group_spans(packed.spans, replace(layout, windows=frozenset({80}), dtype=torch.float64))
    truth = attend_by_torch(exact[0], exact[1], exact[2], groups, dim**-0.5, 80)
    found = attended(cache, packed, q, 80, scale=dim**-0.5).double()
    error, rounding = (float((each - truth).norm() / truth.norm()) for each in (found, truth.to(dtype).double()))
    assert error < 1.1 * 2**0.5 * rounding + 1e-6, f"{error} where one rounding is {rounding}"
