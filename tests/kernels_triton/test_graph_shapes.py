"""How a step is laid out for the device: what is read and what is written go apart, in sizes that come again."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.kernels.triton.row_tables import NO_SPLIT, num_splits
from foretell.runner.cuda.graph_shapes import (
    CAPTURE_ROWS,
    LARGE_TILE,
    MAX_CHAIN_PREFILL,
    SMALL_TILE,
    ChainShape,
    chain_shape,
    prefill_spans,
    split_step,
    step_shape,
)
from foretell.runner.executor import EagerExecutor
from foretell.types import Draft
from tests.kernels_triton.test_forward import BASE, TREE, step, world

WRITTEN = [(40, 1, Draft.chain([3, 4])), (20, 1, TREE), (30, 3, Draft())]
READ = [(0, 50, Draft()), (8, 20, Draft())]
MIXES = {
    "written": WRITTEN,
    "read": READ,
    "written, then read": [*WRITTEN, *READ],
    "read, then written": [*READ, *WRITTEN],
    "in between": [READ[0], WRITTEN[1], READ[1]],
}


def test_prefill_spans_differ_from_drafts() -> None:
    assert prefill_spans(step([*WRITTEN, *READ], 4)) == [False] * 3 + [True] * 2
    assert prefill_spans(step([(100, 1, Draft.chain([1] * 60))], 4)) == [False], "many rows, all of them draft tokens"


@pytest.mark.parametrize("most", [256, 8, 3])
@pytest.mark.parametrize(
    "shapes", [WRITTEN, READ, [*WRITTEN, *READ], [*READ, *WRITTEN], [READ[0], WRITTEN[1], READ[1]]]
)
@torch.inference_mode()
def test_the_passes_of_a_step_give_what_the_step_gives(shapes: list[tuple[int, int, Draft]], most: int) -> None:
    whole = step(shapes, 4)
    some = split_step(whole, most)
    kinds = [set(prefill_spans(each)) for each in some]
    assert all(len(kind) == 1 for kind in kinds)
    assert all(
        each.rows <= most or len(each.spans) == 1 or kind == {True} for each, kind in zip(some, kinds, strict=True)
    )
    model, cache, layout = world(BASE, 4, torch.float32)
    apart = torch.cat([EagerExecutor(model, cache, layout).forward(each, ()).logits for each in some])
    model, cache, layout = world(BASE, 4, torch.float32)
    torch.testing.assert_close(
        apart, EagerExecutor(model, cache, layout).forward(whole, ()).logits, rtol=1e-4, atol=1e-4
    )


def test_steps_of_one_size_share_a_graph() -> None:
    one, _ = step_shape(step([(40, 1, Draft.chain([3, 4, 5, 6]))], 4), 3)
    other, _ = step_shape(step([(300, 1, Draft.chain([9] * 4))], 4), 3)
    assert one == other
    longer, _ = step_shape(step([(600, 1, Draft.chain([9] * 4))], 4), 3)
    assert longer.splits == num_splits(1024) != one.splits


@pytest.mark.parametrize(
    ("shape", "height"),
    [
        ((500, 1, Draft.chain([3] * 3)), SMALL_TILE),
        ((500, 1, Draft.chain([3] * 20)), LARGE_TILE),
        ((500, 1, Draft.chain([3] * 60)), SMALL_TILE),
        ((1000, 1, Draft.chain([3] * 60)), LARGE_TILE),
        ((500, 1, Draft(tuple(range(60)), (-1,) * 60)), LARGE_TILE),
    ],
)
def test_tiles_are_low_for_few_rows_and_where_each_has_its_keys_to_itself(
    shape: tuple[int, int, Draft], height: int
) -> None:
    sizes, _ = step_shape(step([shape], 4, 4800), 3)
    assert sizes.tile_height == height


def test_a_prompt_alone_runs_whole_and_never_in_few_rows() -> None:
    sizes, tiles = step_shape(step(READ, 4), 3)
    assert (sizes.rows, sizes.splits) == (CAPTURE_ROWS[-1], NO_SPLIT)
    assert tiles.shared[:, 1].sum() == 70


@pytest.mark.parametrize("sequences", [1, 3, 64, 65, 96, 100, 129, 192, 256])
def test_a_chain_has_as_many_sequences_as_its_first_step_has_rows_at_most(sequences: int) -> None:
    """Else the second step would run what lay in its tables from before."""
    packed = step([(2, 1, Draft())] * sequences, 4)
    sizes, _ = step_shape(packed, 3)
    chain = chain_shape(packed, sizes, 3, 4, 32)
    assert sequences <= chain.sequences <= chain.first.rows
    assert 2 * sequences > CAPTURE_ROWS[-1] or chain.first.rows >= 2 * sequences, "room for an accepted draft token"


@pytest.mark.parametrize("share", [1, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_catching_up_reuses_the_captured_chain(sequences: int, share: int) -> None:
    """Other drafters draft any number of tokens meanwhile: each count would otherwise need its own graph."""

    def chain(pending: list[int]) -> ChainShape:
        packed = step([(100, rows, Draft()) for rows in pending], 4)
        return chain_shape(packed, step_shape(packed, share)[0], share, 4, 32)

    recorded = chain([1] * sequences)
    for missing in range(2, MAX_CHAIN_PREFILL + 1):
        assert recorded.covers(chain([missing] + [1] * (sequences - 1))), missing
    assert not any(prefill_spans(step([(100, MAX_CHAIN_PREFILL, Draft())], 4))), "it is no prompt yet"
    assert all(prefill_spans(step([(100, MAX_CHAIN_PREFILL + 1, Draft())], 4))), "more is one, and read by itself"
