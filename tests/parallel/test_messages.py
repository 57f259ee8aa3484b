"""What the first rank tells is what the others read."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.kernels.attention import Span
from foretell.parallel.messages import move_message, read_message, step_message
from foretell.runner.pack import Packed

SPANS = {
    "one": [Span(0, 5, 3, (7, 2), ())],
    "several": [Span(0, 2, 9, (1, 2, 3)), Span(2, 6, 0, (9,), (-1, 0, 0, 1)), Span(8, 1, 4, (4, 5))],
}


@pytest.mark.parametrize("wanted", [[], [0, 3]])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_steps(spans: list[Span], wanted: list[int]) -> None:
    rows = sum(span.rows for span in spans)
    packed = Packed(np.arange(3 * rows).reshape(3, rows), spans, wanted)
    model, found = read_message(step_message(3, packed))
    assert isinstance(found, Packed)
    assert (model, found.spans, found.wanted) == (3, spans, wanted)
    assert np.array_equal(found.table, packed.table)


def test_moves() -> None:
    assert read_message(move_message(1, [5, 9, 11], [4, 5, 6])) == (1, ([5, 9, 11], [4, 5, 6]))
