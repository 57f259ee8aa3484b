"""Texts that asked for a speed go before others while they are behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foretell.control.adaptive import AdaptiveController
from foretell.control.length_optimizer import DraftPlan, StepCostView, let_pass
from foretell.control.settings import ControllerSettings, DrafterTraits
from foretell.control.slo import RETRY, SloTracker
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence, SpeculationChoice
from tests import tiny
from tests.control.scenarios import adaptive, free, model, steady
from tests.control.simulation import Machine, Result, Scenario, World

CROWD = free(steady(0.7), Machine(row=0.004), requests=48, tokens=200, load=lambda begun: 8)


def written(scenario: Scenario, throughput: bool) -> Result:
    controller = adaptive(scenario, ControllerSettings(throughput=throughput))
    world = World(scenario, controller)
    controller.hurry.clock = world.clock
    found = world.run()
    assert len(controller.hurry) == 0
    return found


def every_eighth(**choice: float) -> Scenario:
    asked = SpeculationChoice(**choice)  # type: ignore[arg-type]
    return replace(CROWD, choice=lambda request: asked if request % 8 == 0 else SpeculationChoice())


def speed(found: Result, promised: bool) -> float:
    speeds = [value for request, value in found.speeds.items() if (request % 8 == 0) == promised and request < 40]
    return sum(speeds) / len(speeds)


@pytest.mark.parametrize("throughput", [True, False])
@pytest.mark.parametrize("choice", [{"min_tokens_per_second": 27.0}, {"deadline": 200 / 27.0}])
def test_a_text_that_asked_for_a_speed_gets_it_where_others_do_not(throughput: bool, choice: dict[str, float]) -> None:
    without, found = written(CROWD, throughput), written(every_eighth(**choice), throughput)
    assert speed(without, promised=True) < 25
    assert speed(found, promised=True) > 27 * 0.99
    assert speed(found, promised=False) > 0.75 * speed(without, promised=False), "the others go on"


def test_a_speed_that_is_kept_anyway_changes_nothing() -> None:
    assert written(every_eighth(min_tokens_per_second=1.0), True).speeds == written(CROWD, True).speeds


def test_a_draft_model_hurries_a_text_too() -> None:
    crowd = model(steady(0.8), 0.004, Machine(row=0.004), requests=48, tokens=200, load=lambda begun: 8)
    asked = replace(crowd, choice=every_eighth(min_tokens_per_second=24.0).choice)
    assert speed(written(asked, True), promised=True) > 1.1 * speed(written(crowd, True), promised=True)


def test_others_guess_only_where_it_makes_the_step_no_longer() -> None:
    plans = [DraftPlan("a", 3, 2.0, (0.9, 0.8, 0.7)), DraftPlan("a", 2, 2.0, (0.9, 0.8))]
    dear = StepCostView(2, 2, np.linspace(0.01, 0.05, 30))
    assert let_pass(dear, plans, [True, False], True, 0.01) == [3, 0]
    flat = StepCostView(2, 2, np.full(30, 0.01))
    assert let_pass(flat, plans, [True, False], True, 0.01) == [3, 2]
    step = StepCostView(2, 2, np.array([0.01] * 7 + [0.02] * 23))
    assert let_pass(step, plans, [True, False], True, 0.01) == [3, 1]


def test_a_hurry_makes_no_step_unbearable_for_the_others() -> None:
    plans = [DraftPlan("a", 3, 2.0, (0.9, 0.8, 0.7)), DraftPlan("a", 3, 2.0, (0.95, 0.5, 0.4))]
    dear = StepCostView(2, 2, [0.01 * rows for rows in range(1, 30)])
    assert let_pass(dear, plans, [True, True], False, 0.01) == [0, 1], "half as long again, and no longer"
    assert let_pass(
        StepCostView(2, 2, [0.03 + 0.005 * rows for rows in range(30)]), plans, [True, True], False, 0.01
    ) == [
        3,
        1,
    ]


def test_who_is_behind_is_told_by_the_clock() -> None:
    now = [0.0]
    hurry = SloTracker(lambda: now[0])

    def text(written: int, **choice: float) -> Sequence:
        asked = SpeculationChoice(**choice)  # type: ignore[arg-type]
        request = Request("0", (1,), SamplingParams(), 0, 100, speculation=asked)
        return Sequence(0, request, [1] * (1 + written))

    floor = text(0, min_tokens_per_second=10.0)
    assert not hurry.behind([floor], 0.1), "the prompt is still read"
    floor.tokens.append(1)
    assert not hurry.behind([floor], 0.1), "its first token has just come"
    now[0] = 1.0
    floor.tokens += [1] * 5
    assert hurry.behind([floor], 0.1) == [floor]
    floor.tokens += [1] * 10
    assert not hurry.behind([floor], 0.1)
    hurry.forget(0)
    late = text(1, deadline=5.0)
    assert hurry.behind([late], 0.1) == [late], "a hundred plain steps would take ten seconds"
    hurry.forget(0)
    assert not hurry.behind([text(1, deadline=20.0)], 0.1)
    assert not hurry.behind([text(1)], 0.1)


def sequence(written: int, **choice: float) -> Sequence:
    """Return a sequence of up to 100 output tokens with an SLO."""
    asked = SpeculationChoice(**choice)  # type: ignore[arg-type]
    request = Request("0", (1,), SamplingParams(), 0, 100, speculation=asked, drafters=("free",))
    return Sequence(0, request, [1] * (1 + written), cached=written)


def test_priority_ends_with_the_deadline() -> None:
    now = [0.0]
    hurry, seq = SloTracker(lambda: now[0]), sequence(1, deadline=5.0)
    assert hurry.behind([seq], 0.1) == [seq]
    now[0] = 4.9
    assert hurry.behind([seq], 0.1) == [seq]
    now[0] = 5.1
    assert not hurry.behind([seq], 0.1), "it cannot be met any more"


@pytest.mark.parametrize("choice", [{"min_tokens_per_second": 20.0}, {"deadline": 6.0}])
def test_priority_ends_where_the_best_plan_is_too_slow(choice: dict[str, float]) -> None:
    now = [0.0]
    hurry, seq = SloTracker(lambda: now[0]), sequence(1, **choice)
    hurry.behind([seq], 0.1)
    now[0] = 1.0
    assert hurry.behind([seq], 0.1) == [seq]
    assert not hurry.stays_behind(seq, 0.1, best=10.0), "99 tokens at 10 a second are too slow, even with an error"
    assert not hurry.behind([seq], 0.1)
    now[0] += RETRY + 0.01
    assert hurry.behind([seq], 0.1) == [seq], "the estimate is too old"
    assert hurry.stays_behind(seq, 0.1, best=40.0) and hurry.behind([seq], 0.1) == [seq]
    hurry.forget(0)
    assert len(hurry) == 0 and not hurry._best


def test_an_slo_that_is_missed_does_not_hide_the_other_one() -> None:
    now = [0.0]
    hurry, seq = SloTracker(lambda: now[0]), sequence(1, min_tokens_per_second=1000.0, deadline=6.0)
    hurry.behind([seq], 0.1)
    now[0] = 1.0
    assert hurry.stays_behind(seq, 0.1, best=50.0), "the deadline can be met"
    assert not hurry.stays_behind(seq, 0.01, best=50.0), "and would be met anyway"


def test_an_slo_out_of_reach_costs_others_nothing() -> None:
    without, found = written(CROWD, False), written(every_eighth(min_tokens_per_second=5000.0), False)
    assert speed(found, promised=False) > 0.97 * speed(without, promised=False)
    assert speed(found, promised=True) > 0.97 * speed(without, promised=True)


@pytest.mark.parametrize(("reading", "is_behind"), [(0.0, False), (4.0, True)])
def test_a_deadline_counts_from_when_the_prompt_is_taken_up(reading: float, is_behind: bool) -> None:
    now = [0.0]
    controller = AdaptiveController({"free": DrafterTraits(True)}, ControllerSettings(), clock=lambda: now[0])
    controller.costs.observe(1, 0, 0.1)
    asked = SpeculationChoice(deadline=12.0)
    request = Request("0", (1,) * 50, SamplingParams(), 0, 100, drafters=("free",), speculation=asked)
    seq = Sequence(0, request, [1] * 50)
    controller.wants_free_drafts([seq])
    now[0] = reading
    seq.tokens.append(1)
    seq.cached = 50
    controller.wants_free_drafts([seq])
    assert bool(controller._hurried) == is_behind, "ninety-nine steps of a tenth of a second are left"


@pytest.mark.parametrize("name", ["deadline", "min_tokens_per_second"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "2", 1e9, 10**18])
def test_a_speed_that_cannot_be_is_refused(name: str, value: object) -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    with pytest.raises(RequestError, match=f"{name}.* above 0"):
        tiny.add(engine, "0", [1, 2], SpeculationChoice(**{name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", [SpeculationChoice(enabled=False), SpeculationChoice(max_draft=0)])
def test_a_speed_without_guesses_is_refused(choice: SpeculationChoice) -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    with pytest.raises(RequestError, match="nobody guesses"):
        tiny.add(engine, "0", [1, 2], replace(choice, deadline=3.0))


def test_a_speed_reaches_the_engine() -> None:
    engine = tiny.World().engine(tiny.model_drafter())
    (track,) = tiny.add(engine, "0", [1, 2], SpeculationChoice(deadline=3.0, min_tokens_per_second=5))
    choice = track.seq.request.speculation
    assert (choice.deadline, choice.min_tokens_per_second) == (3.0, 5)
