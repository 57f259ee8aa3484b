"""Slots moved in one launch are those that the definition moves."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.kernels.triton.kv_move import KVMover
from foretell.kv.cache import KVCache, LayerShape
from tests.kernels_triton.test_forward import DEVICE


@pytest.mark.parametrize("most", [64, 3])
@pytest.mark.parametrize("path", [(1,), (0, 2, 5), (1, 3, 4, 7)], ids=str)
def test_a_branch_moves_up_in_every_layer(path: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.kernels.triton.kv_move.MAX_SLOTS", most)
    shapes = (LayerShape(2, 8), LayerShape(3, 512), LayerShape(1, 6))
    caches = [KVCache(shapes, 5, 4, torch.float16, DEVICE) for _ in range(2)]
    for mine, defined in zip(*((*cache.keys, *cache.values) for cache in caches), strict=True):
        mine.copy_(torch.randn(mine.shape))
        defined.copy_(mine)
    slots = [9, 10, 11, 4, 5, 6, 7, 16]
    source, target = [slots[node] for node in path], slots[: len(path)]
    KVMover((*caches[0].keys, *caches[0].values))(source, target)
    for tensor in (*caches[1].keys, *caches[1].values):
        flat = tensor.view(20, -1)
        flat[target] = flat[source]
    for mine, defined in zip(*((*cache.keys, *cache.values) for cache in caches), strict=True):
        assert torch.equal(mine, defined)
