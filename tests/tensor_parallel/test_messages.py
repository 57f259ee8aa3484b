"""Workers decode what the leader encodes."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.kernels.attention import Span
from foretell.models.draft_heads import HeadConfig
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.heads.ops import BlockForwardOp, BlockLevelOp, HeadOp, MedusaForwardOp, PrefillOp, StepOp
from foretell.tensor_parallel.messages import (
    head_config_message,
    head_op_message,
    move_message,
    parse_message,
    step_message,
)
from tests.tiny import WITH_CACHE

SPANS = {
    "one": [Span(0, 5, 3, (7, 2), ())],
    "several": [Span(0, 2, 9, (1, 2, 3)), Span(2, 6, 0, (9,), (-1, 0, 0, 1)), Span(8, 1, 4, (4, 5))],
}


@pytest.mark.parametrize("wanted", [[], [0, 3]])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_steps(spans: list[Span], wanted: list[int]) -> None:
    rows = sum(span.rows for span in spans)
    tokens, positions, slots = np.arange(3 * rows).reshape(3, rows).tolist()
    packed = BatchLayout(tokens, positions, slots, spans, wanted)
    model, found = parse_message(step_message(3, packed))
    assert isinstance(found, BatchLayout)
    assert (model, found) == (3, packed)


JOBS_TOLD: list[HeadOp] = [
    PrefillOp([0, 3], [2, 4], [5, 6], [7, 8, 9], [2, 1]),
    PrefillOp([0], [1], [], [3], [1]),
    StepOp([1, 2], [3, 4], [0, 0], [1], [9], [1, 0, 0, 1], [0, 0], 3),
    StepOp([1], [3], [0], [0], [9], [1], [0], 0, 12, [4, 5], [2]),
    BlockForwardOp([4], [9], 3, [1, 2], [2]),
    BlockLevelOp(2, [0, 1], [5, 6], 0, True),
    MedusaForwardOp([11, 12], 2, 1),
]


@pytest.mark.parametrize("job", JOBS_TOLD, ids=lambda job: type(job).__name__)
def test_head_ops(job: HeadOp) -> None:
    assert parse_message(head_op_message(7, job)) == (7, job)


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_head_configs(config: HeadConfig) -> None:
    assert parse_message(head_config_message(5, config)) == (5, config)


def test_moves() -> None:
    assert parse_message(move_message(1, [5, 9, 11], [4, 5, 6])) == (1, ([5, 9, 11], [4, 5, 6]))
