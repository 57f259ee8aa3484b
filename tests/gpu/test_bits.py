"""Batch invariance in half precision: a row has the same bits alone, in a draft and in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from foretell.models.config import ModelConfig
from foretell.types import Draft
from tests.kernels_triton.test_forward import step, world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SMALL = ModelConfig(vocab=512, width=256, layers=2, heads=6, kv_heads=2, head_dim=64, ffn=384, context=2048)
CONFIGS = {
    "small": SMALL,
    "wide": replace(SMALL, width=4096, ffn=4096, heads=12, kv_heads=4),
    "heads of 128": replace(SMALL, head_dim=128),
    "heads of 256": replace(SMALL, heads=4, kv_heads=1, head_dim=256, windows=(64, None), qk_norm=True),
}
CHAIN = [(7 * i) % 32 for i in range(300)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_a_row_has_the_same_bits_at_any_index(config: ModelConfig, dtype: torch.dtype) -> None:
    from foretell.runner.cuda.executor import CudaExecutor

    start = 600
    truth: list[torch.Tensor] = []
    for rows, others in ((1, 0), (5, 0), (30, 0), (64, 0), (100, 0), (200, 0), (1, 7), (5, 31)):
        model, cache, layout = world(config, 8, dtype)
        executor = CudaExecutor(model, cache, layout)
        shapes = [(start, 1, Draft.chain(CHAIN[: rows - 1]))]
        shapes += [(5 + i, 1, Draft.chain(CHAIN[: rows - 1])) for i in range(others)]
        packed = step(shapes, 8)
        for _ in range(3):
            logits = executor.forward(packed, ()).logits[:rows].clone()
        if not truth:
            truth.append(logits)
        assert torch.equal(logits[:1], truth[0]), f"{rows} rows, {others} others"
        if rows > 1 and len(truth) == 1:
            truth.append(logits)
        if rows > 1:
            shared = min(rows, len(truth[1]))
            assert torch.equal(logits[:shared], truth[1][:shared]), f"{rows} rows, {others} others"


def tree_of(nodes: int, wide: int) -> Draft:
    """Return a random tree in which the parent of each node is one of the last few."""
    return Draft(
        tuple(CHAIN[:nodes]), tuple(-1 if node < 2 else node - 1 - node % wide % node for node in range(nodes))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_a_node_has_the_bits_of_its_path_as_a_chain(config: ModelConfig, dtype: torch.dtype) -> None:
    from foretell.runner.cuda.executor import CudaExecutor

    def logits_of(start: int, draft: Draft) -> torch.Tensor:
        model, cache, layout = world(config, 8, dtype)
        return CudaExecutor(model, cache, layout).forward(step([(start, 1, draft)], 8), ()).logits.clone()

    for start, nodes, wide in ((5, 9, 3), (127, 16, 5), (600, 63, 7), (1020, 31, 4)):
        tree = tree_of(nodes, wide)
        found = logits_of(start, tree)
        for leaf in range(nodes - 1, 0, -nodes // 6):
            path = [leaf]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            chain = logits_of(start, Draft.chain([tree.tokens[node] for node in path]))
            assert torch.equal(chain[-1], found[1 + leaf]), f"{nodes} nodes after {start}, node {leaf}"
