"""Draft chains of one CUDA graph equal those drafted token by token, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.draft.model import ModelDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.runner.cuda.executor import CudaExecutor
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.sampling import truncates
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, Sequence
from tests.kernels_triton.test_executor import stand_still
from tests.kernels_triton.test_forward import BASE, DEVICE
from tests.tiny import World, add, generate, run, tiny_decoder

PAGE = 4
SMALL = replace(BASE, layers=1, heads=2, kv_heads=1)
GREEDY, WARM, COOL = (SamplingParams(temperature=each) for each in (0.0, 1.0, 0.4))
TOP_K, TOP_P = SamplingParams(temperature=1.3, top_k=4), SamplingParams(temperature=1.0, top_p=0.6)
ALL = SamplingParams(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05)
MIXES: dict[str, tuple[SamplingParams, ...]] = {
    "sampled": (WARM, COOL, WARM),
    "restricted": (TOP_K, TOP_P, ALL),
    "greedy and sampled": (GREEDY, WARM, TOP_P),
    "alone": (WARM,),
}


@pytest.fixture(autouse=True)
def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)
    monkeypatch.setattr("foretell.runner.cuda.graph_shapes.CAPTURE_CONTEXTS", (64,))


def sequences(params: tuple[SamplingParams, ...], rule: str = "match") -> list[Sequence]:
    """Return sequences of several lengths. The draft of the second one ends with its pages."""
    return [
        Sequence(
            i, Request(str(i), (), each, 77 - 5**i, 0, rule=rule), [(5 * place + i) % 32 for place in range(length)]
        )
        for i, (each, length) in enumerate(zip(params, (9, 14, 3), strict=False))
    ]


def chained(vocab: int = 32, **settings: object) -> tuple[GraphModelDrafter, CudaExecutor]:
    runner = ModelRunner(tiny_decoder(3, SMALL).to(DEVICE), 64, PAGE, 64)
    runner.executor = executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    return GraphModelDrafter(runner, vocab, "chained", **settings), executor  # type: ignore[arg-type]


def by_steps(vocab: int = 32) -> ModelDrafter:
    return ModelDrafter(ModelRunner(tiny_decoder(3, SMALL), 64, PAGE, 64), vocab, "by steps")


def check(mine: Draft, defined: Draft, params: SamplingParams) -> None:
    assert mine.tokens == defined.tokens and mine.parents == defined.parents and len(mine)
    assert (
        mine.sampled is None and mine.probs is None and mine.confidence is not None and defined.confidence is not None
    )
    if truncates(params):
        assert all(0 < own <= sure * 1.001 for own, sure in zip(mine.confidence, defined.confidence, strict=True))
    else:
        assert mine.confidence == pytest.approx(defined.confidence, rel=1e-3)


@pytest.mark.parametrize("mix", MIXES)
def test_drafts_equal_those_drafted_token_by_token(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: in between some draft tokens are accepted and the sequence continues differently after them."""
    monkeypatch.setattr("foretell.draft.model_graph.MAX_CHAIN_PREFILL", 32)  # new tokens run in the chain, too
    (drafter, executor), definition = chained(), by_steps()
    seqs, budgets = sequences(MIXES[mix]), [Budget(3), Budget(2), Budget(1)][: len(MIXES[mix])]
    for accepted in (1, 0):
        expected = definition.propose(seqs, budgets)
        for mine, defined, seq in zip(drafter.propose(seqs, budgets), expected, seqs, strict=True):
            check(mine, defined, seq.request.params)
            seq.tokens += [*defined.tokens[:accepted], 7]
    assert executor.chains.graphs.graphs and all(each.sampled for each in executor.chains.graphs.graphs)
    assert not executor.graph_cache().graphs, "no step was made by itself"


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab", [9, 40])
def test_a_vocabulary_may_be_shorter_or_longer_than_the_drafts(vocab: int, params: SamplingParams) -> None:
    (drafter, executor), seqs, budgets = chained(vocab), sequences((params, params)), [Budget(2)] * 2
    for mine, defined in zip(drafter.propose(seqs, budgets), by_steps(vocab).propose(seqs, budgets), strict=True):
        check(mine, defined, params)
    assert {each.sampled for each in executor.chains.graphs.graphs} == {params.temperature > 0}


def test_a_chain_ends_where_it_is_no_longer_likely() -> None:
    (whole,) = by_steps().propose(sequences((WARM,)), [Budget(3)])
    assert whole.confidence is not None
    floor = 0.99 * whole.confidence[0]
    (drafter, _), budget = chained(), Budget(3, min_probability=floor)
    (mine,), (defined,) = (
        drafter.propose(sequences((WARM,)), [budget]),
        by_steps().propose(sequences((WARM,)), [budget]),
    )
    check(mine, defined, WARM)
    assert len(mine) < len(whole)


@pytest.mark.parametrize(("rule", "temperature"), [("rejection", "fixed"), ("match", "entropy")])
def test_drafts_with_distributions_run_step_by_step(rule: str, temperature: str) -> None:
    drafter, executor = chained(draft_temperature=temperature)
    mixed = [*sequences((GREEDY,)), replace(sequences((WARM,), rule)[0], id=1)]
    for draft in drafter.propose(mixed, [Budget(1)] * 2):
        assert draft.probs is not None and draft.sampled is not None
    assert not executor.chains.graphs.graphs
    assert all(len(draft) for draft in drafter.propose(sequences((GREEDY,), rule), [Budget(1)]))
    assert [each.sampled for each in executor.chains.graphs.graphs] == [False], "greedy sequences need none"


@pytest.mark.parametrize("mix", ["greedy and sampled", "alone"])
def test_drafts_that_stay_on_the_device_are_the_same(mix: str) -> None:
    """A step reads the draft tokens at their positions on the device, and the next draft continues from them."""
    (drafter, _), definition = chained(), by_steps()
    seqs = sequences(MIXES[mix])
    budgets = [Budget(nodes, on_device=True) for nodes in (3, 2, 1)][: len(seqs)]
    for accepted in (1, 0):
        expected = definition.propose(seqs, budgets)
        proposed = drafter.propose(seqs, budgets)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # the device writes them where the host could look too soon
        for mine, defined, seq in zip(proposed, expected, seqs, strict=True):
            assert mine.device_draft is not None and mine.parents == defined.parents
            assert tuple(int(mine.device_draft.token_buffer[-1 - token]) for token in mine.tokens) == defined.tokens
            tokens, sure = mine.device_draft.wait()
            assert tuple(tokens) == defined.tokens and len(sure) == len(tokens)
            seq.tokens += [*defined.tokens[:accepted], 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_step_after_a_device_draft_equals_the_definition(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_after: list[int] = []
    step = CudaExecutor.forward_device_draft
    monkeypatch.setattr(
        CudaExecutor,
        "forward_device_draft",
        lambda self, packed, *rest: (rows_after.append(packed.rows), step(self, packed, *rest))[1],
    )
    world, (drafter, _) = World(pages=32, device=DEVICE.type, config=SMALL, budget=2), chained()
    engine = world.engine(drafter)
    runner = engine.runner
    runner.executor = CudaExecutor(runner.model, runner.cache, runner.layout)
    prompts = [[4, 9, 2], [7]]
    tracks = [add(engine, str(i), p, max_tokens=5, temperature=temperature)[0] for i, p in enumerate(prompts)]
    run(engine)
    truth = generate(prompts=prompts, world=World(config=SMALL), max_tokens=5, temperature=temperature)
    assert [track.seq.tokens[len(prompt) :] for track, prompt in zip(tracks, prompts, strict=True)] == truth
    assert rows_after and engine.stats.speculation.drafted
