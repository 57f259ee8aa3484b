"""After warm-up the first request replays graphs only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from foretell.control.controller import FixedController
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.warmup import Warmup
from foretell.models.draft_heads import HeadConfig
from foretell.runner.cuda import graphs as stock
from foretell.runner.cuda.executor import CudaExecutor
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.cuda.warmup import dummy_tree
from foretell.types import Draft
from tests.engine.test_warmup import generate_after, long_engine, of_all_sizes, tasks
from tests.kernels_triton.test_forward import BASE, TREE, step, world
from tests.tiny import PROMPTS, WITH_CACHE, OwnHead, World, add, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_the_first_request_needs_no_capture() -> None:
    engine = long_engine(ScriptedDrafter(of_all_sizes), "cuda")
    executor = engine.runner.executor
    assert isinstance(executor, CudaExecutor)
    Warmup(engine, tasks).run(120)
    recorded = dict(executor.graph_cache().graphs)
    assert recorded and None not in recorded.values() and engine.runner.pool.num_held == 0
    generate_after(engine, 256)
    assert executor.graph_cache().graphs == recorded


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_head_has_captured_its_drafts_and_prefills(config: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "CAPTURE_AFTER", 1_000_000)  # no capture of shapes that larger graphs serve
    engine = World(pages=512, device="cuda").engine(drafter := OwnHead(config))
    drafter.traits = replace(drafter.traits, makes_trees=True)
    Warmup(engine, partial(tasks, names=(drafter.name,))).run(120)
    head = drafter.inner
    assert isinstance(head, HeadDrafter) and head._graph_prefill is not None
    readings, drafts = head._graph_prefill.graphs.graphs, head._graph.graphs.graphs  # type: ignore[attr-defined]
    assert readings and drafts and None not in [*readings.values(), *drafts.values()]
    assert any(sizes.width for sizes in drafts) and any(sizes.sampled for sizes in drafts)
    recorded = len(readings), len(drafts)
    for temperature in (0.0, 1.0):
        for engine.controller in (FixedController(7), FixedController(24, 5), FixedController(3)):
            for number, prompt in enumerate(PROMPTS):
                add(engine, str(number), prompt, temperature=temperature)
                run(engine)
    assert (len(readings), len(drafts)) == recorded, "no new shape came, and captured ones served"


@torch.inference_mode()
def test_a_larger_graph_returns_the_same_bits() -> None:
    """The graph of a tree after a long context serves plain steps, chains and smaller trees."""
    for dtype in (torch.bfloat16, torch.float16):
        for shape in ((30, 1, Draft()), (500, 1, Draft.chain([3, 4, 5])), (130, 1, TREE)):
            packed, found = step([shape], 8), []
            for serves in (False, True):
                model, cache, layout = world(BASE, 8, dtype)
                executor = CudaExecutor(model, cache, layout)
                if serves:
                    with capture_now():
                        executor.forward(step([(900, 1, dummy_tree(63))], 8), ())
                    model, fresh, _ = world(BASE, 8, dtype)  # without the KV of that step
                    for mine, old in zip((*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True):
                        mine.copy_(old)
                found += [executor.forward(packed, ()).logits.clone() for _ in range(3)]
                assert len(executor.graph_cache().graphs) == 1
            assert all(torch.equal(each, found[0]) for each in found), f"{dtype}, {shape[0]} cached"
