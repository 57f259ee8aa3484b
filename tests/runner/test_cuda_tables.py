"""The tables of a plain step, written as one list, equal those written field by field."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.kernels.triton.row_tables import StepShape
from foretell.runner.batch_layout import BatchLayout, pack
from foretell.runner.cuda.graph_shapes import is_plain_decode, split_step
from foretell.runner.cuda.tables import make_tiles, write_tables
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence


def step(lengths: list[int], draft: Draft = Draft()) -> BatchLayout:
    """Return a step of sequences with these numbers of cached tokens, one new token and a draft."""
    shares = []
    for number, length in enumerate(lengths):
        tokens = [(7 * i + number) % 32 for i in range(length + 1)]
        seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, length)
        seq.pages = list(range(50 * number, 50 * number + 40))
        shares.append(ScheduledSequence.of(seq, 1))
    return pack(shares, [draft] * len(shares), 4)


@pytest.mark.parametrize("lengths", [[0], [17], [3, 90, 12], [5] * 8], ids=str)
def test_plain_decode_tables_equal_the_general_ones(lengths: list[int]) -> None:
    packed = step(lengths)
    sizes = StepShape(8, 8, 16, 4)
    tables = [np.full(sizes.table_size, -77, np.int32) for _ in range(2)]
    write_tables(tables[0], packed, None, sizes)
    write_tables(tables[1], packed, make_tiles(packed, 5), sizes)
    assert np.array_equal(*tables)


def test_which_steps_are_plain_decoding() -> None:
    assert is_plain_decode(step([3, 9]))
    assert not is_plain_decode(step([3, 9], Draft.chain([1])))
    packed = step([3, 9, 4])
    assert split_step(packed, 3) == [packed], "one pass"
    assert [some.rows for some in split_step(packed, 2)] == [2, 1]
