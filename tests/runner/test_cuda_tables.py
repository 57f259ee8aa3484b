"""A plain step's tables, written as one list, are those that are laid out field by field."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.kernels.triton.row_tables import StepShape
from foretell.runner.batch_layout import BatchLayout, pack
from foretell.runner.cuda.split_prefill import passes, single
from foretell.runner.cuda.tables import fill, make_tiles
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence


def step(lengths: list[int], draft: Draft = Draft()) -> BatchLayout:
    """Texts with so many cached tokens, each with its last one to run, and a draft."""
    shares = []
    for number, length in enumerate(lengths):
        tokens = [(7 * i + number) % 32 for i in range(length + 1)]
        seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, length)
        seq.pages = list(range(50 * number, 50 * number + 40))
        shares.append(ScheduledSequence.of(seq, 1))
    return pack(shares, [draft] * len(shares), 4)


@pytest.mark.parametrize("lengths", [[0], [17], [3, 90, 12], [5] * 8], ids=str)
def test_one_row_each_is_laid_out_alike(lengths: list[int]) -> None:
    packed = step(lengths)
    sizes = StepShape(8, 8, 16, 4)
    tables = [np.full(sizes.table_size, -77, np.int32) for _ in range(2)]
    fill(tables[0], packed, None, sizes)
    fill(tables[1], packed, make_tiles(packed, 5), sizes)
    assert np.array_equal(*tables)


def test_which_steps_are_plain() -> None:
    assert single(step([3, 9]))
    assert not single(step([3, 9], Draft.chain([1])))
    packed = step([3, 9, 4])
    assert passes(packed, 3) == [packed], "one pass"
    assert [some.rows for some in passes(packed, 2)] == [2, 1]
