"""The promise of the controller, in a world of numbers: close to the best fixed length, and never slower than plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.control.settings import ControllerSettings
from tests.control.scenarios import DRIFTING, STATIONARY, adapted, free, steady
from tests.control.simulation import Always, Arm, Scenario, World, best_fixed


@pytest.mark.parametrize("scenario", STATIONARY.values(), ids=STATIONARY)
def test_where_nothing_changes_it_is_within_a_twentieth_of_the_best(scenario: Scenario) -> None:
    best, plain = best_fixed(scenario, (0, 1, 2, 4, 8, 16))
    taken = adapted(scenario).seconds
    assert best / taken >= 0.95
    assert plain / taken >= 0.97


@pytest.mark.parametrize("scenario", DRIFTING.values(), ids=DRIFTING)
def test_where_things_change_it_is_within_a_tenth_of_the_best(scenario: Scenario) -> None:
    best, plain = best_fixed(scenario, (0, 2, 8))
    taken = adapted(scenario).seconds
    assert best / taken >= 0.90
    assert plain / taken >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", [*STATIONARY, *DRIFTING])
def test_it_is_no_matter_of_luck(name: str, seed: int) -> None:
    scenario = replace({**STATIONARY, **DRIFTING}[name], seed=seed)
    best, plain = best_fixed(scenario)
    taken = adapted(scenario).seconds
    assert best / taken >= (0.95 if name in STATIONARY else 0.90)
    assert plain / taken >= 0.97


@pytest.mark.parametrize("throughput", [False, True])
def test_both_goals_gain(throughput: bool) -> None:
    scenario = free(steady(0.8), load=lambda begun: 4)
    _, plain = best_fixed(scenario, (0,))
    assert plain / adapted(scenario, ControllerSettings(throughput=throughput)).seconds > 1.5


def test_the_world_itself_is_fair() -> None:
    """A fixed length must take what arithmetic says, or nothing above means anything."""
    scenario = Scenario((Arm("free", steady(0.5)),), requests=50, tokens=400)
    found = World(scenario, Always("free", 2)).run()
    assert found.tokens == 50 * 400
    assert found.tokens / found.steps == pytest.approx(1 + 0.5 + 0.25, rel=0.02)
    machine = scenario.machine
    rows = found.drafted + found.steps
    context = sum(machine.token * place for place in range(1, 401)) * 50 / (found.tokens / found.steps)
    assert found.seconds == pytest.approx(
        found.steps * machine.base + machine.row * (rows - found.steps) + context, rel=0.02
    )
