"""Async scheduling: when a step is launched early, what discards it, and how steps are timed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foretell.draft.heads.wiring_check import generate_samples
from foretell.draft.mix import MixDrafter
from foretell.engine import async_scheduling
from foretell.engine.async_scheduling import MAX_DEVICE_DRAFT_ROWS, InFlightStep, StepTimer, can_draft_on_device
from foretell.runner.cuda.graphs import mark_outlier
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, SpeculationChoice, StepResult, StepTimes
from tests.engine.test_swap import swapping
from tests.fake_async import DeviceDraftDrafter, FakeAsyncExecutor, FakeDeviceDraft
from tests.laws.test_async_scheduling import async_engine
from tests.laws.test_losslessness import DRAFTERS, truth_for
from tests.tiny import PROMPTS, World, add, model_drafter, run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_other_work_on_the_device_between_two_steps_changes_no_output(batch_size: int, temperature: float) -> None:
    """Measuring a new head between two steps destroys the logits of the last step and the step in flight."""
    truth = truth_for("sampled" if temperature else "greedy")
    engine, executor = async_engine(World(), None)
    states = [add(engine, str(i), PROMPTS[i], temperature=temperature)[0] for i in range(batch_size)]
    for _ in range(3):
        engine.step()
    before = executor.sent
    with torch.inference_mode():
        generate_samples(engine.runner, [[3, 1, 4, 1, 5]])
    run(engine)
    assert before
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth[:batch_size]


def test_a_sequence_swapped_in_to_other_pages_discards_the_step_in_flight() -> None:
    """Its KV was copied to the host before that step had written the last token's."""
    engine, swap = swapping(World(page_size=4, prefix_cache=False))
    engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(4):
        engine.step()
    assert engine.async_scheduler.in_flight is not None
    for seq in engine.scheduler.running[::-1]:
        engine.scheduler.preempt(seq)
    for tensor in engine.runner.cache.tensors:
        tensor.fill_(7.0)
    engine.scheduler.schedule([])
    assert swap.swapped_in > 2
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth_for("greedy")


def test_replacing_the_drafter_discards_the_step_in_flight() -> None:
    engine, _ = async_engine(World(), None)
    (state,) = add(engine, "0", PROMPTS[0])
    for _ in range(3):
        engine.step()
    assert engine.async_scheduler.in_flight is not None
    engine.drafter = model_drafter(seed=5)
    assert engine.async_scheduler.in_flight is None
    run(engine)
    assert state.seq.tokens[len(PROMPTS[0]) :] == truth_for("greedy")[0]


@pytest.mark.parametrize("aborted", [False, True])
def test_no_step_is_left_in_flight_after_the_last_sequence(aborted: bool) -> None:
    engine, _ = async_engine(World(), None)
    tokens = truth_for("greedy")[0]
    add(engine, "0", PROMPTS[0], stop_token_ids=[tokens[5]])
    for _ in range(3):
        engine.step()
    if aborted:
        engine.abort("0")
    run(engine)
    assert engine.async_scheduler.in_flight is None and engine.async_scheduler.timer.last_tokens_at is None


class ObservedTimes:
    """The times that the controller observes."""

    def __init__(self, engine: Any) -> None:
        self.times: list[StepTimes] = []
        engine.controller.observe = lambda results, times: self.times.append(times)


def test_a_step_whose_launch_captured_a_graph_is_an_outlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the step that waited for that launch."""
    monkeypatch.setattr("foretell.engine.async_scheduling.LATE_SHARE", math.inf)  # a busy machine excludes no step
    engine, executor = async_engine(World(), None)
    observed, forward_async = ObservedTimes(engine), executor.forward_async

    def ahead(*args: Any) -> Any:
        if executor.sent == 5:
            mark_outlier()
        return forward_async(*args)

    executor.forward_async = ahead  # type: ignore[method-assign]
    add(engine, "0", PROMPTS[0], max_tokens=20, ignore_eos=True)
    run(engine)
    outliers = [i for i, times in enumerate(observed.times) if times.is_outlier]
    assert len(outliers) == 2 and outliers[1] == outliers[0] + 1


def test_a_sequence_waiting_for_pages_does_not_stop_async_scheduling_until_pages_are_free() -> None:
    engine, executor = async_engine(World(page_size=4, pages=24, max_num_seqs=16, prefix_cache=False), None)
    add(engine, "0", PROMPTS[1], max_tokens=60, ignore_eos=True)
    for _ in range(3):
        engine.step()
    (late,) = add(engine, "1", [5] * 80, max_tokens=10, ignore_eos=True)
    before = executor.sent
    for _ in range(30):
        engine.step()
    assert executor.sent - before > 25 and late.timings.started is None
    run(engine)
    assert late.timings.started is not None


def test_a_prompt_that_did_not_fit_into_the_step_is_scheduled_next() -> None:
    engine, executor = async_engine(World(max_step_tokens=16), None)
    add(engine, "0", [3], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        engine.step()
    (state,) = add(engine, "1", [5] * 60, max_tokens=2)
    for _ in range(8):
        engine.step()
    assert state.seq.num_output_tokens
    run(engine)


ON_DEVICE: dict[str, tuple[SpeculationChoice, float, bool]] = {
    "greedy": (SpeculationChoice(), 0.0, True),
    "sampled": (SpeculationChoice(), 1.0, True),
    "block, greedy": (SpeculationChoice(rule="block"), 0.0, True),
    "block, sampled": (SpeculationChoice(rule="block"), 1.0, False),
    "rejection, sampled": (SpeculationChoice(rule="rejection"), 1.0, False),
    "lossy": (SpeculationChoice(rule="typical"), 0.0, False),
    "details": (SpeculationChoice(details=True), 0.0, False),
}


@pytest.mark.parametrize(("choice", "temperature", "launched"), ON_DEVICE.values(), ids=ON_DEVICE)
def test_only_tokens_that_depend_on_their_logits_alone_are_sampled_on_the_device(
    choice: SpeculationChoice, temperature: float, launched: bool
) -> None:
    outputs = []
    for plain in (True, False):
        engine = World().engine(model_drafter(seed=5)) if plain else async_engine(World(), model_drafter(seed=5))[0]
        engine.controller = type(engine.controller)(0)  # without drafts both decide alike
        engine.controller.expects_plain_step = lambda seqs: True  # type: ignore[method-assign]
        engine.controller.keeps_plain = lambda seqs, free_drafts: True  # type: ignore[method-assign]
        states = [add(engine, str(i), prompt, choice, temperature=temperature)[0] for i, prompt in enumerate(PROMPTS)]
        run(engine)
        outputs.append([state.seq.tokens for state in states])
    assert outputs[0] == outputs[1]
    assert bool(engine.runner.executor.sent) == launched  # type: ignore[attr-defined]


def decoding(rule: str = "match", num_new_tokens: int = 1, batch_size: int = 1) -> list[ScheduledSequence]:
    request = Request("0", (1,), SamplingParams(), 0, 9, rule=rule)
    return [ScheduledSequence.of(Sequence(i, request, [1, 2, 3], 2), num_new_tokens) for i in range(batch_size)]


def test_draft_tokens_stay_on_the_device_only_if_the_host_does_not_need_them() -> None:
    drafter, device = MixDrafter([DeviceDraftDrafter(model_drafter())]), "cpu"
    four = [Budget(4, drafter.name)]
    assert can_draft_on_device(decoding(), four, drafter, device)
    assert not can_draft_on_device(decoding(), [Budget()], drafter, device), "there are no drafts"
    assert not can_draft_on_device(decoding(), four, drafter, "cuda:1"), "they are on another device"
    assert not can_draft_on_device(decoding("block"), four, drafter, device), "verified by their distributions"
    assert not can_draft_on_device(decoding(num_new_tokens=2), four, drafter, device), (
        "a prefill may take several passes"
    )
    many = MAX_DEVICE_DRAFT_ROWS // 5
    assert can_draft_on_device(decoding(batch_size=many), four * many, drafter, device)
    assert not can_draft_on_device(decoding(batch_size=many + 1), four * (many + 1), drafter, device)
    assert not can_draft_on_device(decoding(batch_size=2), [*four, Budget(4, "another")], drafter, device)


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "ensemble", "typical"])
def test_device_drafts_that_are_lost_enter_no_output(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(left: FakeDeviceDraft) -> tuple[list[int], list[float]]:
        raise RuntimeError("planted")

    monkeypatch.setattr(FakeDeviceDraft, "wait", lost)
    engine, _ = async_engine(World(), DeviceDraftDrafter(DRAFTERS["oracle"](truth_for("greedy"))))
    states = [add(engine, str(i), p, SpeculationChoice(rule=rule))[0] for i, p in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    assert all(min(state.seq.tokens) >= 0 for state in states)


class ManualClock:
    """A clock that tests set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(async_scheduling, "perf_counter", lambda: self.now)


def in_flight(launched_at: float, tokens_at: float, **fields: Any) -> InFlightStep:
    return InFlightStep(
        decoding(),
        launched_at,
        drafts=[Draft()],
        drafted_at=launched_at,
        launched_at=launched_at,
        tokens_at=tokens_at,
        **fields,
    )


def test_a_step_is_timed_from_when_the_device_was_free_and_the_host_gap_is_what_lies_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, timer = ManualClock(monkeypatch), StepTimer()
    first = timer.async_times(in_flight(1.0, 4.0))
    assert (first.target_seconds, first.host_gap) == (3.0, None), "unknown since when the device was idle"
    waited = timer.async_times(in_flight(4.5, 7.5, propose_seconds=0.2))
    assert (waited.target_seconds, waited.host_gap) == (pytest.approx(3.0), pytest.approx(0.3))
    early = timer.async_times(in_flight(5.0, 10.5, is_async=True))
    assert (early.target_seconds, early.host_gap, early.draft_seconds) == (3.0, None, 0.0)
    clock.now = 10.6
    timer.leave()
    clock.now = 30.6  # the caller is busy
    timer.enter()
    slow = timer.async_times(in_flight(30.8, 34.0, caller_seconds=timer.caller_seconds))
    assert (slow.target_seconds, slow.host_gap) == (pytest.approx(3.2), pytest.approx(0.3))
    soon = in_flight(34.1, 37.1, caller_seconds=timer.caller_seconds)  # launched before the deltas are emitted
    clock.now = 34.2
    timer.leave()
    clock.now = 36.0
    timer.enter()
    overlapped = timer.async_times(soon)
    assert (overlapped.target_seconds, overlapped.host_gap) == (pytest.approx(3.0), pytest.approx(0.1)), (
        "the caller's time overlaps with the device's"
    )
    assert not overlapped.is_outlier
    late = in_flight(37.2, 60.1, caller_seconds=timer.caller_seconds)
    timer.leave()
    clock.now = 60.0  # the device was done long before
    timer.enter()
    assert timer.async_times(late).is_outlier, "unknown when the device was done"
    timer.reset()
    assert timer.async_times(in_flight(99.0, 100.0)).host_gap is None


def test_host_work_on_tokens_is_part_of_the_host_gap_and_not_of_their_step() -> None:
    """Otherwise synchronous steps would seem longer than async ones, and a draft cheaper than it is."""
    timer = StepTimer()
    timer.async_times(in_flight(1.0, 4.0, topk_seconds=0.25))
    times = timer.async_times(in_flight(4.5, 7.5, topk_seconds=0.25))
    assert (times.target_seconds, times.host_gap) == (3.0, 0.5), "the top-k for drafters is in the gap"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_of_a_step_arrive_before_they_are_verified(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes a second to verify each step here, and the device no time at all."""
    clock = ManualClock(monkeypatch)
    for module in ("verifier", "engine"):
        monkeypatch.setattr(f"foretell.engine.{module}.perf_counter", lambda: clock.now)
    engine, _ = async_engine(World(), DRAFTERS["oracle"](truth_for("greedy")))
    seen: list[StepTimes] = []
    verify, observe = engine.verifier.verify, engine.observe

    def slow(step: InFlightStep) -> list[StepResult]:
        results = verify(step)
        clock.now += 1.0
        return results

    def recording(results: list[StepResult], times: StepTimes) -> None:
        seen.append(times)
        observe(results, times)

    monkeypatch.setattr(engine, "observe", recording)
    monkeypatch.setattr(engine.verifier, "verify", slow)
    monkeypatch.setattr(engine.controller, "expects_plain_step", lambda seqs: False)
    add(engine, "0", PROMPTS[0], SpeculationChoice(), temperature=temperature, ignore_eos=True)
    while engine.busy:
        engine.step()
    waited = [times for times in seen if times.host_gap is not None]
    assert waited and all((times.target_seconds, times.host_gap) == (0.0, 1.0) for times in waited)


def test_a_prefill_step_has_no_host_gap() -> None:
    timer = StepTimer()
    prefill = in_flight(1.0, 2.0)
    prefill.scheduled = decoding(num_new_tokens=2)
    timer.async_times(prefill)
    assert timer.async_times(in_flight(9.0, 12.0)).host_gap is None


def test_time_to_draft_on_the_device_counts_as_drafting() -> None:
    step = in_flight(1.0, 7.0, propose_seconds=0.1)
    step.set_device_drafts([Draft()], 4.0)
    times = StepTimer().async_times(step)
    assert (times.propose_seconds, times.target_seconds) == (pytest.approx(3.1), 3.0)
