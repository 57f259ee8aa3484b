"""The executor as a whole; without a device what is recorded is run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.engine.warmup import Warmup
from foretell.kernels.triton.scatter_tokens import scatter_tokens
from foretell.runner.cuda.executor import CudaExecutor
from foretell.runner.cuda.graphs import GraphCapture, capture_now
from foretell.runner.cuda.warmup import DRAFT_STEPS, PLAIN_STEPS, DummyStep, dummy_tree, run_dummy_steps, warm_up_chain
from foretell.runner.executor import EagerExecutor
from foretell.runner.model_runner import ModelRunner
from foretell.types import Draft
from tests.kernels_triton.test_forward import BASE, DEVICE, TREE, step, world
from tests.tiny import World, add, generate, run, tiny_decoder


class Still:
    """Stands for an event or a stream where nothing runs concurrently."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


class Again:
    """Stands for a graph: it runs once more what was recorded, and leaves what comes of it where it was then."""

    def __init__(self, run: Callable[[], tuple[torch.Tensor | None, ...]]) -> None:
        self.run, self.left = run, run()

    def replay(self) -> None:
        for here, now in zip(self.left, self.run(), strict=True):
            if here is not None and now is not None and here.data_ptr() != now.data_ptr():
                here.copy_(now)
                now.fill_(float("nan"))


def recorded(run: Callable[[], tuple[torch.Tensor | None, ...]]) -> tuple[Again, tuple[torch.Tensor | None, ...]]:
    graph = Again(run)
    return graph, graph.left


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        for name in ("Event", "Stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, Still)
        monkeypatch.setattr(GraphCapture, "capture", lambda _, run: recorded(run))


def test_dummy_steps_run_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)
    runner = ModelRunner(tiny_decoder(config=BASE).to(DEVICE), 8, 16, 128, (0, 2))
    runner.executor = executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    small = [
        step
        for step in PLAIN_STEPS + DRAFT_STEPS
        if step.sequences <= 2 and step.num_new_tokens == 1 and step.length < 25
    ]
    assert run_dummy_steps(runner, small) == len(small) > 4
    for sampled in (False, True):
        warm_up_chain(runner, sampled)
    assert [sizes.sampled for sizes in executor.chains.graphs.graphs] == [False, True]


def test_warmed_up_graphs_give_what_the_definition_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)
    engine = World(pages=32, device=DEVICE.type, config=BASE).engine()
    runner = engine.runner
    runner.executor = executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    steps = [DummyStep(cached=3), DummyStep(cached=3, draft=dummy_tree(2))]
    Warmup(engine, lambda rehearsal: (partial(rehearsal.step, step) for step in steps)).run(600)
    recordings = executor.graph_cache().graphs
    assert len(recordings) == len(steps) and None not in recordings.values()
    (track,) = add(engine, "0", [4], max_tokens=2)
    run(engine)
    assert track.seq.tokens[1:] == generate(prompts=[[4]], world=World(config=BASE), max_tokens=2)[0]


@torch.inference_mode()
def test_a_padded_graph_gives_what_the_definition_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a tree with a longer context serves a plain step, a chain, a smaller tree and two sequences."""
    stand_still(monkeypatch)
    monkeypatch.setattr("foretell.runner.cuda.graph_shapes.CAPTURE_CONTEXTS", (64, 128))
    model, cache, layout = world(BASE, 4, torch.float32)
    executor, definition = CudaExecutor(model, cache, layout), EagerExecutor(model, cache, layout)
    with capture_now():
        executor.forward(step([(100, 1, dummy_tree(7))], 4), (1,))
    recorded = dict(executor.graph_cache((1,)).graphs)
    chain = Draft.chain([3, 4])
    for shapes in ([(30, 1, Draft())], [(20, 1, chain)], [(70, 1, TREE)], [(9, 1, chain), (30, 1, Draft())]):
        mine = executor.forward(packed := step(shapes, 4), (1,))
        defined = definition.forward(packed, (1,))
        assert mine.hidden_states is not None and defined.hidden_states is not None and mine.argmax is not None
        torch.testing.assert_close(mine.logits, defined.logits, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(mine.hidden_states, defined.hidden_states, rtol=2e-4, atol=2e-4)
        assert mine.argmax() == defined.logits.argmax(-1).tolist()
    assert executor.graph_cache((1,)).graphs == recorded and len(recorded) == 1


@pytest.mark.parametrize("read", [[(0, 12, Draft())], [(0, 12, Draft()), (4, 18, Draft())]], ids=["few", "many"])
@torch.inference_mode()
def test_a_step_of_several_passes_equals_its_definition(
    read: list[tuple[int, int, Draft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_still(monkeypatch)
    for module in ("executor", "graph_shapes"):
        monkeypatch.setattr(f"foretell.runner.cuda.{module}.CAPTURE_ROWS", (1, 2, 4, 8, 16))
    packed = step([(20, 1, TREE), (9, 1, Draft.chain([3, 4])), *read], 4)
    model, cache, layout = world(BASE, 4, torch.float32)
    mine = CudaExecutor(model, cache, layout).forward(packed, (1, 2))
    fast = cache.keys[1].clone()
    model, cache, layout = world(BASE, 4, torch.float32)
    defined = EagerExecutor(model, cache, layout).forward(packed, (1, 2))
    assert mine.hidden_states is not None
    assert defined.hidden_states is not None
    torch.testing.assert_close(mine.logits, defined.logits, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine.hidden_states, defined.hidden_states, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(fast, cache.keys[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_async_steps_generate_what_the_definition_generates(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences, of which one ends first: the other then has another row."""
    stand_still(monkeypatch)
    engine = World(pages=32, device=DEVICE.type, config=BASE).engine()
    runner = engine.runner
    runner.executor = executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    sent: list[int] = []
    before = executor.forward_async
    monkeypatch.setattr(
        executor, "forward_async", lambda packed, *rest: (sent.append(packed.rows), before(packed, *rest))[1]
    )
    settings: dict[str, object] = {"temperature": temperature, "ignore_eos": True}
    requests = [(prompt, tokens) for prompt, tokens in (([4, 9], 3), ([7], 6))]
    tracks = [add(engine, str(i), prompt, max_tokens=n, **settings)[0] for i, (prompt, n) in enumerate(requests)]
    run(engine)
    assert sent == [2, 2, 1, 1, 1]
    for i, ((prompt, tokens), track) in enumerate(zip(requests, tracks, strict=True)):
        alone = World(config=BASE).engine()
        (right,) = add(alone, str(i), prompt, max_tokens=tokens, **settings)
        run(alone)
        assert track.seq.tokens == right.seq.tokens


def test_tokens_are_sampled_from_the_logits_of_their_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recording leaves its logits where it was made to, and a larger step has them in other room."""
    stand_still(monkeypatch)
    engine = World(pages=32, device=DEVICE.type, config=BASE).engine()
    runner = engine.runner
    runner.executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    settings: dict[str, object] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 4}
    truth = generate(prompts=[[4], [7], [9]], world=World(config=BASE), **settings)
    with capture_now():
        for requests in ((0,), (0, 1, 2), (0,)):
            tracks = [add(engine, str(i), [[4], [7], [9]][i], **settings)[0] for i in requests]
            run(engine)
            assert [track.seq.tokens[1:] for track in tracks] == [truth[i] for i in requests]


def test_open_tokens_are_those_the_step_before_came_to() -> None:
    chosen = torch.tensor([11, 12, 13, 99], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([-3, 5, -1, 0, 7], dtype=torch.int32, device=DEVICE)
    landed = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    scatter_tokens(tokens, chosen, landed, 3)
    assert tokens.tolist() == [13, 5, 11, 0, 7]
    assert landed.tolist() == [11, 12, 13, 0]


@torch.inference_mode()
def test_top_k_tokens_are_those_of_the_previous_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)
    model, cache, layout = world(BASE, 4, torch.float32)
    executor = CudaExecutor(model, cache, layout)
    first = executor.forward(packed := step([(9, 1, Draft()), (14, 1, Draft())], 4), ())
    argmax, best = first.logits.argmax(-1).tolist(), first.logits.topk(3).indices.tolist()
    sent = executor.forward_async(replace(packed, tokens=[-2, -1]), (), None, 3)
    assert sent is not None and sent.wait_previous_tokens() == (argmax, best)
    found = sent.output.logits.clone()
    again = executor.forward(replace(packed, tokens=argmax[::-1]), ())
    assert torch.equal(found, again.logits) and not torch.equal(found, found[[1, 0]])
