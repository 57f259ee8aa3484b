"""The executor as a whole, on steps that come for the first time: there is nothing to record without a device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.runner.cuda import CudaExecutor
from foretell.runner.executor import EagerExecutor
from foretell.types import Draft
from tests.kernels_triton.test_forward import BASE, TREE, step, world


class Still:
    """Stands for an event or a stream where nothing runs beside the host."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


@pytest.mark.parametrize("read", [[(0, 12, Draft())], [(0, 12, Draft()), (4, 18, Draft())]], ids=["few", "many"])
@torch.inference_mode()
def test_a_step_of_several_passes_equals_its_definition(
    read: list[tuple[int, int, Draft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        for name in ("Event", "Stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, Still)
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
