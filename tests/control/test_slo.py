"""Sequences that are late on their SLO get priority."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foretell.control.adaptive import AdaptiveController
from foretell.control.choice import DrafterOption, StepCostView, choose
from foretell.control.latency_model import DraftPrices
from foretell.control.sequence_history import SequenceHistory
from foretell.control.settings import ControllerSettings, ControllerTuning
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams
from foretell.types import DrafterTraits, Request, Sequence, SpeculationChoice
from tests import tiny
from tests.control.scenarios import adaptive, free, model, steady
from tests.control.simulation import Machine, Scenario, SimulationResult, Simulator

BATCH_OF_8 = free(steady(0.7), Machine(row=0.004), requests=48, tokens=200, load=lambda started: 8)


def simulate(scenario: Scenario, throughput: bool) -> SimulationResult:
    controller = adaptive(scenario, ControllerSettings(throughput=throughput))
    simulator = Simulator(scenario, controller)
    controller.clock = simulator.clock
    # The clock is without noise and the reported times are not, so their difference is not host time.
    controller.host_gap.observe_step = lambda *given: None  # type: ignore[method-assign]
    found = simulator.run()
    assert not controller.states
    return found


def every_eighth(**choice: float) -> Scenario:
    asked = SpeculationChoice(**choice)  # type: ignore[arg-type]
    return replace(BATCH_OF_8, choice=lambda request: asked if request % 8 == 0 else SpeculationChoice())


def speed(found: SimulationResult, with_slo: bool) -> float:
    speeds = [value for request, value in found.speeds.items() if (request % 8 == 0) == with_slo and request < 40]
    return sum(speeds) / len(speeds)


@pytest.mark.parametrize("throughput", [True, False])
@pytest.mark.parametrize("choice", [{"min_tokens_per_second": 27.0}, {"deadline": 200 / 27.0}])
def test_a_sequence_with_an_slo_meets_it(throughput: bool, choice: dict[str, float]) -> None:
    without, found = simulate(BATCH_OF_8, throughput), simulate(every_eighth(**choice), throughput)
    assert speed(without, with_slo=True) < 25
    assert speed(found, with_slo=True) > 27 * 0.99
    assert speed(found, with_slo=False) > 0.75 * speed(without, with_slo=False), "the others do not starve"


def test_an_slo_that_is_met_anyway_changes_nothing() -> None:
    assert simulate(every_eighth(min_tokens_per_second=1.0), True).speeds == simulate(BATCH_OF_8, True).speeds


def test_a_draft_model_speeds_up_a_late_sequence() -> None:
    batch = model(steady(0.8), 0.004, Machine(row=0.004), requests=48, tokens=200, load=lambda started: 8)
    asked = replace(batch, choice=every_eighth(min_tokens_per_second=24.0).choice)
    assert speed(simulate(asked, True), with_slo=True) > 1.1 * speed(simulate(batch, True), with_slo=True)


EXPENSIVE = [0.01 + 0.0014 * rows for rows in range(30)]
PROBS = [[0.9, 0.8, 0.7], [0.9, 0.8]]


def free_rows(count: int) -> list[float]:
    """Return the costs of a step by rows: so many rows cost no more than one, and further ones double its time."""
    return [0.01] * (count + 1) + [0.02] * 30


def lengths(
    curve: list[float], is_late: list[bool], throughput: bool = True, probs: list[list[float]] = PROBS
) -> list[int]:
    options, count = [[DrafterOption("a", each)] for each in probs], len(probs)
    return [choice.nodes for choice in choose(StepCostView(count, count, curve), options, 0.01, throughput, is_late)]


@pytest.mark.parametrize("throughput", [True, False])
def test_late_sequences_get_rows_first(throughput: bool) -> None:
    assert lengths(free_rows(4), [], throughput) == [1, 1]
    assert lengths(free_rows(4), [True, False], throughput) == [2, 0]
    assert lengths(free_rows(4), [False, True], throughput) == [0, 2]
    assert lengths(free_rows(6), [True, False], throughput) == [3, 1], "the others draft in rows that are free"
    assert lengths(free_rows(30), [False, True], throughput) == [3, 2]


def test_a_late_sequence_has_the_draft_that_is_fastest_for_it_alone() -> None:
    """There is no room for drafts of all."""
    three = [[0.5, 0.3]] * 3
    assert lengths(free_rows(5), [], probs=three) == [0, 0, 0]
    assert lengths(free_rows(5), [False, True, False], probs=three) == [0, 2, 0]


def test_the_others_do_not_draft_in_expensive_rows() -> None:
    assert lengths(EXPENSIVE, []) == [3, 2]
    assert lengths(EXPENSIVE, [True, False]) == [3, 0]
    assert lengths(EXPENSIVE, [False, True]) == [0, 2]


@pytest.mark.parametrize("shares_options", [False, True])
def test_sequences_that_are_all_late_draft_as_if_none_was(shares_options: bool) -> None:
    """None has priority over another, and a step that is slower than a plain one helps none of them."""
    option = DrafterOption("head", [0.8**depth for depth in range(1, 9)], DraftPrices(level=0.0005))
    shared = [option]
    options = [shared if shares_options else [option] for _ in range(8)]
    view = StepCostView(8, 8, [0.01 + 0.0014 * rows for rows in range(80)])
    found = [
        [choice.nodes for choice in choose(view, options, 0.01, True, is_late)] for is_late in ([False] * 8, [True] * 8)
    ]
    assert found[0] == found[1]


TUNING = ControllerTuning()


def state_of(num_output: int, **choice: float) -> SequenceHistory:
    """Return a sequence of up to 100 output tokens with an SLO, admitted at 0 seconds."""
    asked = SpeculationChoice(**choice)  # type: ignore[arg-type]
    request = Request("0", (1,), SamplingParams(), 0, 100, speculation=asked, drafters=("free",))
    seq = Sequence(0, request, [1] * (1 + num_output), num_computed_tokens=num_output)
    return SequenceHistory(seq, {})


def is_late(state: SequenceHistory, now: float, best: float | None = None) -> bool:
    """Return whether it is late if a plain step takes 0.1 s; `best`: tokens per second of a plan estimated now."""
    if best is not None:
        state.best_speed, state.best_until = best, now + TUNING.slo_hold_seconds
    return state.is_late(now, 0.1, TUNING)


def test_late_sequences_are_found_by_the_clock() -> None:
    fast = state_of(0, min_tokens_per_second=10.0)
    assert not is_late(fast, 0.0), "still in prefill"
    fast.seq.tokens.append(1)
    assert not is_late(fast, 0.0), "its first token is new"
    fast.seq.tokens += [1] * 5
    assert is_late(fast, 1.0)
    fast.seq.tokens += [1] * 10
    assert not is_late(fast, 1.0)
    assert is_late(state_of(1, deadline=5.0), 0.0), "a hundred plain steps would take ten seconds"
    assert not is_late(state_of(1, deadline=20.0), 0.0)
    assert not state_of(1).has_slo and not is_late(state_of(1), 0.0)


def test_priority_ends_with_the_deadline() -> None:
    state = state_of(1, deadline=5.0)
    assert is_late(state, 0.0) and is_late(state, 4.9)
    assert not is_late(state, 5.1), "it cannot be met anymore"


@pytest.mark.parametrize("choice", [{"min_tokens_per_second": 20.0}, {"deadline": 6.0}])
def test_priority_ends_where_the_best_plan_is_too_slow(choice: dict[str, float]) -> None:
    state, now = state_of(1, **choice), 1.0
    is_late(state, 0.0)
    assert is_late(state, now)
    assert not is_late(state, now, best=10.0), "99 tokens at 10 a second are too slow, even with an error"
    assert not is_late(state, now)
    now += TUNING.slo_hold_seconds + 0.01
    assert is_late(state, now), "the estimate is too old"
    assert is_late(state, now, best=40.0) and is_late(state, now)


def test_an_slo_that_is_missed_does_not_hide_the_other_one() -> None:
    state = state_of(1, min_tokens_per_second=1000.0, deadline=6.0)
    is_late(state, 0.0)
    assert is_late(state, 1.0, best=50.0), "the deadline can be met"
    assert not state.is_late(1.0, 0.01, TUNING), "and would be met anyway"


def test_an_slo_out_of_reach_costs_others_nothing() -> None:
    without, found = simulate(BATCH_OF_8, False), simulate(every_eighth(min_tokens_per_second=5000.0), False)
    assert speed(found, with_slo=False) > 0.97 * speed(without, with_slo=False)
    assert speed(found, with_slo=True) > 0.97 * speed(without, with_slo=True)


@pytest.mark.parametrize(("prefill_seconds", "is_late"), [(0.0, False), (4.0, True)])
def test_a_deadline_counts_from_admission(prefill_seconds: float, is_late: bool) -> None:
    now = [0.0]
    controller = AdaptiveController({"free": DrafterTraits(is_free=True)}, ControllerSettings(), clock=lambda: now[0])
    controller.costs.observe(1, 0, 0.1)
    asked = SpeculationChoice(deadline=12.0)
    request = Request("0", (1,) * 50, SamplingParams(), 0, 100, drafters=("free",), speculation=asked)
    seq = Sequence(0, request, [1] * 50)
    controller.wants_free_drafts([seq])
    now[0] = prefill_seconds
    seq.tokens.append(1)
    seq.num_computed_tokens = 50
    controller.wants_free_drafts([seq])
    assert bool(controller._late) == is_late, "99 steps of 0.1 s remain"


@pytest.mark.parametrize("name", ["deadline", "min_tokens_per_second"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "2", 1e9, 10**18])
def test_an_invalid_slo_is_rejected(name: str, value: object) -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    with pytest.raises(RequestError, match=f"{name}.* above 0"):
        tiny.add(engine, "0", [1, 2], SpeculationChoice(**{name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", [SpeculationChoice(enabled=False), SpeculationChoice(max_draft=0)])
def test_an_slo_without_drafts_is_rejected(choice: SpeculationChoice) -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    with pytest.raises(RequestError, match="needs a drafter"):
        tiny.add(engine, "0", [1, 2], replace(choice, deadline=3.0))


def test_an_slo_reaches_the_engine() -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    (state,) = tiny.add(engine, "0", [1, 2], SpeculationChoice(deadline=3.0, min_tokens_per_second=5))
    choice = state.seq.request.speculation
    assert (choice.deadline, choice.min_tokens_per_second) == (3.0, 5)
