"""After a rehearsal the first request is replayed: nothing it needs comes for the first time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from foretell.draft.heads import HeadDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.rehearsal import Rehearsal
from foretell.models.heads import HeadConfig
from foretell.runner.cuda import CudaExecutor
from tests.engine.test_rehearsal import long_engine, of_all_sizes, pieces, write
from tests.tiny import HEADS, OwnHead, World

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_first_request_is_recorded_already() -> None:
    engine = long_engine(ScriptedDrafter(of_all_sizes), "cuda")
    executor = engine.runner.executor
    assert isinstance(executor, CudaExecutor)
    Rehearsal(engine, pieces).run(120)
    recorded = dict(executor._recordings)
    assert recorded and None not in recorded.values() and engine.runner.pool.held == 0
    write(engine, 256)
    assert executor._recordings == recorded


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_has_recorded_its_drafts_and_its_readings(config: HeadConfig) -> None:
    engine = World(pages=128, device="cuda").engine(drafter := OwnHead(config))
    Rehearsal(engine, partial(pieces, names=(drafter.name,))).run(120)
    head = drafter.inner
    assert isinstance(head, HeadDrafter) and head._whole_reader is not None
    readings, drafts = head._whole_reader.recorder.recordings, head._whole.recorder.recordings  # type: ignore[attr-defined]
    assert readings and drafts and None not in [*readings.values(), *drafts.values()]
