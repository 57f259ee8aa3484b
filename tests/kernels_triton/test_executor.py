"""The executor as a whole, on steps that come for the first time: there is nothing to record without a device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.runner.cuda import CudaExecutor
from foretell.runner.cuda_warm import GUESSED, PLAIN, rehearse
from foretell.runner.executor import EagerExecutor
from foretell.runner.runner import ModelRunner
from foretell.types import Draft
from tests.kernels_triton.test_forward import BASE, DEVICE, TREE, step, world
from tests.tiny import tiny_decoder


class Still:
    """Stands for an event or a stream where nothing runs beside the host."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        for name in ("Event", "Stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, Still)


def test_steps_of_nothing_go_through_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)
    runner = ModelRunner(tiny_decoder(config=BASE).to(DEVICE), 8, 16, 128, (0, 2))
    runner.executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    small = [step for step in PLAIN + GUESSED if step.texts <= 2 and step.take == 1 and step.length < 30]
    assert rehearse(runner, small) == len(small) > 3


@pytest.mark.parametrize("read", [[(0, 12, Draft())], [(0, 12, Draft()), (4, 18, Draft())]], ids=["few", "many"])
@torch.inference_mode()
def test_a_step_of_several_passes_equals_its_definition(
    read: list[tuple[int, int, Draft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_still(monkeypatch)
    monkeypatch.setattr("foretell.runner.cuda.ROWS", (1, 2, 4, 8, 16))
    packed = step([(20, 1, TREE), (9, 1, Draft.chain([3, 4])), *read], 4)
    model, cache, layout = world(BASE, 4, torch.float32)
    mine = CudaExecutor(model, cache, layout)(packed, (1, 2))
    fast = cache.keys[1].clone()
    model, cache, layout = world(BASE, 4, torch.float32)
    defined = EagerExecutor(model, cache, layout)(packed, (1, 2))
    assert mine.features is not None
    assert defined.features is not None
    torch.testing.assert_close(mine.logits, defined.logits, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine.features, defined.features, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(fast, cache.keys[1], rtol=2e-4, atol=2e-4)
