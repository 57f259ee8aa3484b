"""Steps on a device that works beside the host: what ends one that was sent, what keeps one back, and the clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foretell.draft.heads.wiring_check import write
from foretell.engine import async_step as stopwatch
from foretell.engine.async_step import UNSEEN_ROWS, InFlightStep, StepTimer, may_stay_unseen
from foretell.runner.cuda.graphs import mark_outlier
from foretell.runner.executor import StepOutput
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, SpeculationChoice, StepResult, StepTimes
from tests.engine.test_swap import swapping
from tests.laws.test_ahead import outrunning
from tests.laws.test_same_text import DRAFTERS, truth_for
from tests.outruns import LeavesUnseen, Left, Outruns
from tests.tiny import PROMPTS, World, add, model_drafter, run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("texts", [1, 5])
def test_what_others_run_on_the_model_between_two_steps_changes_nothing(texts: int, temperature: float) -> None:
    """A head is tried while texts are written: what the last step left is lost, and so is the one that was sent."""
    truth = truth_for("sampled" if temperature else "greedy")
    engine, executor = outrunning(World(), None)
    tracks = [add(engine, str(i), PROMPTS[i], temperature=temperature)[0] for i in range(texts)]
    for _ in range(3):
        engine.step()
    before = executor.sent
    with torch.inference_mode():
        write(engine.runner, [[3, 1, 4, 1, 5]])
    run(engine)
    assert before
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth[:texts]


def test_who_comes_back_to_other_pages_is_not_where_the_step_was_sent() -> None:
    """Its keys and values were copied away before that wrote the last of them."""
    engine, swap = swapping(World(page_size=4, prefix_cache=False))
    engine.runner.executor = Outruns(engine.runner.executor)
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(4):
        engine.step()
    assert engine._ahead is not None
    for seq in engine.scheduler.running[::-1]:
        engine.scheduler.preempt(seq)
    for tensor in engine.runner.cache.tensors:
        tensor.fill_(7.0)
    engine.scheduler.schedule([])
    assert swap.brought_back > 2
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth_for("greedy")


def test_another_drafter_drops_what_was_sent() -> None:
    engine, _ = outrunning(World(), None)
    (track,) = add(engine, "0", PROMPTS[0])
    for _ in range(3):
        engine.step()
    assert engine._ahead is not None
    engine.drafter = model_drafter(seed=5)
    assert engine._ahead is None
    run(engine)
    assert track.seq.tokens[len(PROMPTS[0]) :] == truth_for("greedy")[0]


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_is_kept_behind_the_last_text(aborted: bool) -> None:
    engine, _ = outrunning(World(), None)
    text = truth_for("greedy")[0]
    add(engine, "0", PROMPTS[0], stop_token_ids=[text[5]])
    for _ in range(3):
        engine.step()
    if aborted:
        engine.abort("0")
    run(engine)
    assert engine._ahead is None and engine._clock._landed is None


class Heard:
    """What a controller is told of each step."""

    def __init__(self, engine: Any) -> None:
        self.times: list[StepTimes] = []
        engine.controller.observe = lambda outcomes, times: self.times.append(times)


def test_a_step_that_was_recorded_when_it_was_sent_tells_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the one that had to wait for that."""
    monkeypatch.setattr("foretell.engine.async_step.LATE", math.inf)  # a busy machine excludes no step
    engine, executor = outrunning(World(), None)
    heard, before = Heard(engine), executor.forward_async

    def ahead(*args: Any) -> Any:
        if executor.sent == 5:
            mark_outlier()
        return before(*args)

    executor.forward_async = ahead  # type: ignore[method-assign]
    add(engine, "0", PROMPTS[0], max_tokens=20, ignore_eos=True)
    run(engine)
    odd = [i for i, times in enumerate(heard.times) if times.is_outlier]
    assert len(odd) == 2 and odd[1] == odd[0] + 1


def test_who_waits_for_pages_keeps_nobody_back_until_there_are_some() -> None:
    engine, executor = outrunning(World(page_size=4, pages=24, max_num_seqs=16, prefix_cache=False), None)
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


def test_a_prompt_that_had_no_room_in_the_step_is_not_left_behind() -> None:
    engine, executor = outrunning(World(max_step_tokens=16), None)
    add(engine, "0", [3], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        engine.step()
    (track,) = add(engine, "1", [5] * 60, max_tokens=2)
    for _ in range(8):
        engine.step()
    assert track.seq.num_output_tokens
    run(engine)


ALONE: dict[str, tuple[SpeculationChoice, float, bool]] = {
    "greedy": (SpeculationChoice(), 0.0, True),
    "drawn": (SpeculationChoice(), 1.0, True),
    "block, greedy": (SpeculationChoice(rule="block"), 0.0, True),
    "block, drawn": (SpeculationChoice(rule="block"), 1.0, False),
    "rejection, drawn": (SpeculationChoice(rule="rejection"), 1.0, False),
    "lossy": (SpeculationChoice(rule="typical"), 0.0, False),
    "details": (SpeculationChoice(details=True), 0.0, False),
}


@pytest.mark.parametrize(("choice", "temperature", "sent"), ALONE.values(), ids=ALONE)
def test_only_tokens_that_hang_on_their_row_alone_are_taken_up_unseen(
    choice: SpeculationChoice, temperature: float, sent: bool
) -> None:
    texts = []
    for plain in (True, False):
        engine = World().engine(model_drafter(seed=5)) if plain else outrunning(World(), model_drafter(seed=5))[0]
        engine.controller = type(engine.controller)(0)  # nobody guesses, so that both decide alike
        engine.controller.expects_plain_step = lambda seqs: True  # type: ignore[method-assign]
        engine.controller.keeps_plain = lambda seqs, offers: True  # type: ignore[method-assign]
        tracks = [add(engine, str(i), prompt, choice, temperature=temperature)[0] for i, prompt in enumerate(PROMPTS)]
        run(engine)
        texts.append([track.seq.tokens for track in tracks])
    assert texts[0] == texts[1]
    assert bool(engine.runner.executor.sent) == sent  # type: ignore[attr-defined]


def shares(rule: str = "match", take: int = 1, texts: int = 1) -> list[ScheduledSequence]:
    request = Request("0", (1,), SamplingParams(), 0, 9, rule=rule)
    return [ScheduledSequence.of(Sequence(i, request, [1, 2, 3], 2), take) for i in range(texts)]


def test_guesses_stay_unseen_only_where_nobody_has_to_look() -> None:
    drafter = LeavesUnseen(model_drafter())
    name, device = drafter.name, "cpu"
    four = [Budget(4, name)]
    assert may_stay_unseen(shares(), four, drafter, device)
    assert not may_stay_unseen(shares(), [Budget()], drafter, device), "there are none"
    assert not may_stay_unseen(shares(), four, drafter, "cuda:1"), "they are elsewhere"
    assert not may_stay_unseen(shares("block"), four, drafter, device), "judged by what they were drawn from"
    assert not may_stay_unseen(shares(take=2), four, drafter, device), "a prompt may take several passes"
    many = UNSEEN_ROWS // 5
    assert may_stay_unseen(shares(texts=many), four * many, drafter, device)
    assert not may_stay_unseen(shares(texts=many + 1), four * (many + 1), drafter, device)
    assert not may_stay_unseen(shares(texts=2), [*four, Budget(4, "another")], drafter, device)


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "ensemble", "typical"])
def test_guesses_that_are_lost_enter_no_text(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(left: Left) -> tuple[list[int], list[float]]:
        raise RuntimeError("planted")

    monkeypatch.setattr(Left, "wait", lost)
    engine, _ = outrunning(World(), LeavesUnseen(DRAFTERS["oracle"](truth_for("greedy"))))
    tracks = [add(engine, str(i), p, SpeculationChoice(rule=rule))[0] for i, p in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    assert all(min(track.seq.tokens) >= 0 for track in tracks)


class Hand:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(stopwatch, "perf_counter", lambda: self.now)


def flight(launched: float, arrived: float, proposing: float = 0.0, **more: Any) -> InFlightStep:
    output = StepOutput(torch.empty(0), None)
    return InFlightStep(shares(), [Draft()], output, launched, launched, launched, proposing, arrived=arrived, **more)


def test_a_step_takes_from_where_its_device_was_free_and_a_wait_is_what_lies_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand, clock = Hand(monkeypatch), StepTimer()
    first = clock.beside(flight(1.0, 4.0), 0.0)
    assert (first.target_seconds, first.host_gap) == (3.0, None), "nobody knows since when it had nothing to do"
    waited = clock.beside(flight(4.5, 7.5, proposing=0.2), 0.0)
    assert (waited.target_seconds, waited.host_gap) == (pytest.approx(3.0), pytest.approx(0.3))
    early = clock.beside(flight(5.0, 10.5, is_ahead=True), 0.0)
    assert (early.target_seconds, early.host_gap, early.draft_seconds) == (3.0, None, 0.0)
    hand.now = 10.6
    clock.leave()
    hand.now = 30.6  # a caller reads
    clock.enter()
    slow = clock.beside(flight(30.8, 34.0, away=clock.away), 0.0)
    assert (slow.target_seconds, slow.host_gap) == (pytest.approx(3.2), pytest.approx(0.3))
    soon = flight(34.1, 37.1, away=clock.away)  # launched before what was written is told
    hand.now = 34.2
    clock.leave()
    hand.now = 36.0
    clock.enter()
    told = clock.beside(soon, 0.0)
    assert (told.target_seconds, told.host_gap) == (pytest.approx(3.0), pytest.approx(0.1)), (
        "that callers read costs nothing"
    )
    assert not told.is_outlier
    late = flight(37.2, 60.1, away=clock.away)
    clock.leave()
    hand.now = 60.0  # the device was done long before
    clock.enter()
    assert clock.beside(late, 0.0).is_outlier, "when it was nobody knows"
    clock.rest()
    assert clock.beside(flight(99.0, 100.0), 0.0).host_gap is None


def test_what_the_host_does_with_tokens_is_waited_for_and_no_part_of_their_step() -> None:
    """Else steps that are not sent ahead would seem longer than those that are, and a guess cheaper than it is."""
    clock = StepTimer()
    clock.beside(flight(1.0, 4.0), 0.25)
    times = clock.beside(flight(4.5, 7.5), 0.25)
    assert (times.target_seconds, times.host_gap) == (3.0, 0.5), "what only drafters want to know is in the wait"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_arrives_before_its_tokens_are_judged_and_looked_at(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is slow here in what it does behind each answer of the device, and the device takes no time at all."""
    hand = Hand(monkeypatch)
    for module in ("verifier", "engine"):
        monkeypatch.setattr(f"foretell.engine.{module}.perf_counter", lambda: hand.now)
    engine, _ = outrunning(World(), DRAFTERS["oracle"](truth_for("greedy")))
    seen: list[StepTimes] = []
    court, learn = engine.verifier, engine._learn

    def slow(flight: InFlightStep) -> tuple[list[StepResult], float]:
        found = court(flight)
        hand.now += 1.0
        return found

    def noted(outcomes: list[StepResult], times: StepTimes) -> None:
        seen.append(times)
        learn(outcomes, times)

    monkeypatch.setattr(engine, "_learn", noted)
    monkeypatch.setattr(engine, "verifier", slow)
    monkeypatch.setattr(engine.controller, "expects_plain_step", lambda seqs: False)
    slow.wants_top = court.wants_top  # type: ignore[attr-defined]
    add(engine, "0", PROMPTS[0], SpeculationChoice(), temperature=temperature, ignore_eos=True)
    while engine.busy:
        engine.step()
    waited = [times for times in seen if times.host_gap is not None]
    assert waited and all((times.target_seconds, times.host_gap) == (0.0, 1.0) for times in waited)


def test_a_prompt_tells_nothing_of_waits() -> None:
    clock = StepTimer()
    reading = flight(1.0, 2.0)
    reading.plan = shares(take=2)
    clock.beside(reading, 0.0)
    assert clock.beside(flight(9.0, 12.0), 0.0).host_gap is None


def test_guesses_made_on_the_device_are_counted_as_such() -> None:
    step = flight(1.0, 7.0, proposing=0.1)
    step.see([Draft()], 4.0)
    times = StepTimer().beside(step, 0.0)
    assert (times.propose_seconds, times.target_seconds) == (pytest.approx(3.1), 3.0)
