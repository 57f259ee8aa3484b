"""What the first rank tells the others: a few whole numbers a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell.kernels.attention import Span
from foretell.runner.pack import Packed, span_lists

STEP, MOVE = 0, 1
FIELDS = 6  # of a span


def step_message(model: int, packed: Packed) -> bytes:
    """Rows to run; who reads this answers with sums alone, so it need not know what becomes of them."""
    spans, pages, parents = span_lists(packed.spans)
    counts = [packed.rows, len(packed.spans), len(pages), len(parents), len(packed.wanted)]
    head, tail = [STEP, model, *counts], [*spans, *pages, *parents, *packed.wanted]
    return np.array(head, np.int64).tobytes() + packed.table.tobytes() + np.array(tail, np.int64).tobytes()


def move_message(model: int, source: Sequence[int], target: Sequence[int]) -> bytes:
    """Slots whose keys and values move, for an accepted branch."""
    return np.array([MOVE, model, *source, *target], np.int64).tobytes()


def read_message(message: bytes) -> tuple[int, Packed | tuple[list[int], list[int]]]:
    """Which model, and a step's rows, or where slots move from and to."""
    kind, model, *_ = numbers = np.frombuffer(message, np.int64)
    if kind == MOVE:
        half = len(numbers) // 2 + 1
        return int(model), (numbers[2:half].tolist(), numbers[half:].tolist())
    rows, *counts = numbers[2:7].tolist()
    sizes = np.array([3 * rows, FIELDS * counts[0], *counts[1:]])
    table, spans, pages, parents, wanted = np.split(numbers[7:], np.cumsum(sizes)[:-1])
    return int(model), Packed(
        table.reshape(3, rows), _spans(spans.tolist(), pages.tolist(), parents.tolist()), wanted.tolist()
    )


def _spans(fields: list[int], pages: list[int], parents: list[int]) -> list[Span]:
    rows = [fields[at : at + FIELDS] for at in range(0, len(fields), FIELDS)]
    ends = [row[3] for row in rows[1:]] + [len(pages)]
    return [
        Span(first, count, start, tuple(pages[page:end]), tuple(parents[parent : parent + nodes]))
        for (first, count, start, page, nodes, parent), end in zip(rows, ends, strict=True)
    ]
