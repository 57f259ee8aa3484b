"""Async scheduling changes when tokens arrive, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foretell.draft.base import Drafter
from foretell.engine.engine import Engine
from foretell.types import SpeculationChoice
from tests.fake_async import DeviceDraftDrafter, FakeAsyncExecutor, FakeDeviceDraft, RandomController
from tests.laws.test_losslessness import DRAFTERS, SAMPLING, Truth, truth_for
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, check_pages, model_drafter, run

WORLDS = {
    "page 4": World(),
    "page 1": World(page_size=1, pages=600),
    "few pages": World(page_size=4, pages=12, max_num_seqs=5),
    "two at a time": World(max_num_seqs=2, prefix_cache=False),
}
HEADED = {f"head: {name}": lambda truth, config=config: OwnHead(config) for name, config in HEADS.items()}
ALL: dict[str, Callable[[Truth], Drafter | None]] = {"none": lambda truth: None, **DRAFTERS, **HEADED}


def async_engine(world: World, drafter: Drafter | None, seed: int = 0) -> tuple[Engine, FakeAsyncExecutor]:
    engine = world.engine(drafter)
    executor = engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    if drafter is not None:
        engine.controller = RandomController(world.budget, world.levels, seed)
    return engine, executor


def generated(engine: Engine, after_step: Callable[[Engine], None] = lambda engine: None, **params: object) -> Truth:
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, **params)]
    run(engine, after_step)
    assert engine.runner.pool.num_held == 0, "all pages are back"
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", ["greedy", "top p", "stop token"])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_output_is_the_same(make: Callable[[Truth], Drafter | None], sampling: str, world: World) -> None:
    truth = truth_for(sampling)
    engine, executor = async_engine(world, make(truth))
    assert generated(engine, **SAMPLING[sampling]) == truth
    assert executor.sent


CHAINS = {
    name: DRAFTERS[name]
    for name in ("the same model", "another model", "another model, few pages", "suffix", "oracle that errs")
}


@pytest.mark.parametrize("sampling", ["greedy", "top p", "stop token"])
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_device_drafts_do_not_change_it_either(make: Callable[[Truth], Drafter], sampling: str) -> None:
    truth = truth_for(sampling)
    for world in (World(), World(page_size=4, pages=12, max_num_seqs=5)):
        engine, executor = async_engine(world, drafter := DeviceDraftDrafter(make(truth)))
        assert generated(engine, **SAMPLING[sampling]) == truth
        assert executor.num_device_drafts and drafter.left
        counts = engine.stats.speculation
        assert counts.tokens - counts.steps <= counts.accepted <= counts.drafted  # the last may be a draft token


def test_device_drafts_that_are_lost_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(left: FakeDeviceDraft) -> tuple[list[int], list[float]]:
        raise RuntimeError("planted")

    monkeypatch.setattr(FakeDeviceDraft, "wait", lost)
    truth = truth_for("greedy")
    engine, _ = async_engine(World(), DeviceDraftDrafter(DRAFTERS["oracle"](truth)))
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt)]
    while engine.busy:
        engine.step()
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert engine.stats.drafter_failures and not engine.stats.speculation.accepted


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_preemption_between_two_steps_changes_nothing(make: Callable[[Truth], Drafter | None]) -> None:
    truth, rng = truth_for("sampled"), random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.1:
                engine.scheduler.preempt(seq)

    for world in (World(), World(prefix_cache=False)):
        engine, executor = async_engine(world, make(truth))
        assert generated(engine, preempt_some, temperature=1.0) == truth
        assert executor.sent


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_an_abort_between_two_steps_affects_no_other_sequence(make: Callable[[Truth], Drafter | None]) -> None:
    truth = truth_for("sampled")
    for num_steps in range(2, 7):
        engine, _ = async_engine(World(), make(truth), num_steps)
        states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(num_steps):
            engine.step()
        for aborted in ("1", "3"):
            engine.abort(aborted)
        check_pages(engine)
        run(engine)
        assert engine.runner.pool.num_held == 0
        for i in (0, 2, 4):
            assert states[i].seq.tokens[len(PROMPTS[i]) :] == truth[i]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("num_steps", range(2, 8))
def test_a_late_request_is_scheduled(num_steps: int, alone: bool) -> None:
    """Also if all requests before it have finished or were aborted in the meantime."""
    truth = truth_for("greedy")
    engine, _ = async_engine(World(), None)
    if not alone:
        add(engine, "2", PROMPTS[2], ignore_eos=True)
    first = add(engine, "0", PROMPTS[0], max_tokens=num_steps)
    for _ in range(num_steps - 1):
        engine.step()
    if num_steps % 2:
        engine.abort("0")
    second = add(engine, "1", PROMPTS[1])
    for _ in range(2):
        engine.step()
    assert second[0].timings.started is not None, "it waits for the step in flight, and for no other"
    run(engine)
    assert second[0].seq.tokens[len(PROMPTS[1]) :] == truth[1]
    if not num_steps % 2:
        assert first[0].seq.tokens[len(PROMPTS[0]) :] == truth[0][:num_steps]


HOST_SAMPLING: dict[str, dict[str, object]] = {
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "min tokens": {"min_tokens": 9, "stop_token_ids": [7, 8], "temperature": 1.0},
    "logprobs": {"logprobs": 3, "temperature": 1.0},
    "prompt logprobs": {"prompt_logprobs": 2},
    "biased": {"logit_bias": {5: 3.0, 9: -2.0}},
}


@pytest.mark.parametrize("params", HOST_SAMPLING.values(), ids=HOST_SAMPLING)
def test_requests_that_need_the_host_are_not_launched_ahead(params: dict[str, object]) -> None:
    plain = World().engine()
    expected = generated(plain, **params)
    engine, executor = async_engine(World(), None)
    assert generated(engine, **params) == expected
    if "min_tokens" in params:
        assert executor.sent, "after min_tokens"
    else:
        assert not executor.sent


def test_plain_steps_are_launched_ahead() -> None:
    """Plain sequences of one length: after the first two, every step but the last is launched ahead."""
    engine, executor = async_engine(World(), None)
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, max_tokens=20, ignore_eos=True)
    run(engine)
    assert executor.sent >= 18
    assert engine.stats.speculation.tokens == 20 * len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["match", "rejection", "block", "ensemble", "confidence"])
def test_each_rule_accepts_the_same_with_async_scheduling(rule: str, temperature: float) -> None:
    """The rule decides also where the device has computed the argmax already."""
    lenient = (0.05, 0.01) if rule == "confidence" else None  # accepts draft tokens that the target would not choose
    choice, results = SpeculationChoice(rule=rule, acceptance_threshold=lenient), []
    for is_async in (False, True):
        engine = World().engine(model_drafter(seed=5))
        if is_async:
            engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
        engine.controller = RandomController(3, seed=1)
        states = [add(engine, str(i), prompt, choice, temperature=temperature)[0] for i, prompt in enumerate(PROMPTS)]
        if is_async:
            engine.controller.expects_plain_step = lambda seqs: False  # type: ignore[method-assign] # so that both decide alike
        run(engine)
        results.append([(state.seq.tokens, state.speculation.accepted) for state in states])
    assert results[0] == results[1]
    own = truth_for("sampled" if temperature else "greedy")
    if rule == "confidence":
        assert any(
            tokens[len(prompt) :] != output
            for (tokens, _), prompt, output in zip(results[0], PROMPTS, own, strict=True)
        )
