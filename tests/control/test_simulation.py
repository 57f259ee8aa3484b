"""The adaptive controller in the simulator: close to the best fixed length, and never slower than plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.control.settings import ControllerSettings
from tests.control.scenarios import DRIFTING, STATIONARY, free, run_adaptive, steady
from tests.control.simulation import FixedDrafterController, Scenario, SimulatedDrafter, Simulator, best_fixed

# Least share of the best fixed length. A draft that costs more than a plain step to start is rarely tried by chance.
LEAST = {**dict.fromkeys(STATIONARY, 0.95), **dict.fromkeys(DRIFTING, 0.90), "model, slow to start 1.0": 0.94}


@pytest.mark.parametrize("name", STATIONARY)
def test_stationary_scenarios_are_within_5_percent_of_the_best_fixed_length(name: str) -> None:
    scenario = STATIONARY[name]
    best, plain = best_fixed(scenario, (0, 1, 2, 4, 8, 16))
    seconds = run_adaptive(scenario).seconds
    assert best / seconds >= LEAST[name]
    assert plain / seconds >= 0.97


@pytest.mark.parametrize("scenario", DRIFTING.values(), ids=DRIFTING)
def test_drifting_scenarios_are_within_10_percent_of_the_best_fixed_length(scenario: Scenario) -> None:
    best, plain = best_fixed(scenario, (0, 2, 8))
    seconds = run_adaptive(scenario).seconds
    assert best / seconds >= 0.90
    assert plain / seconds >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", [*STATIONARY, *DRIFTING])
def test_the_bounds_hold_for_other_seeds(name: str, seed: int) -> None:
    scenario = replace({**STATIONARY, **DRIFTING}[name], seed=seed)
    best, plain = best_fixed(scenario)
    seconds = run_adaptive(scenario).seconds
    assert best / seconds >= LEAST[name]
    assert plain / seconds >= 0.97


@pytest.mark.parametrize("throughput", [False, True])
def test_both_goals_gain(throughput: bool) -> None:
    scenario = free(steady(0.8), load=lambda started: 4)
    _, plain = best_fixed(scenario, (0,))
    assert plain / run_adaptive(scenario, ControllerSettings(throughput=throughput)).seconds > 1.5


def test_the_simulator_agrees_with_arithmetic() -> None:
    """A fixed length must take the expected time, or the other tests mean nothing."""
    scenario = Scenario((SimulatedDrafter("free", steady(0.5)),), requests=50, tokens=400)
    found = Simulator(scenario, FixedDrafterController("free", 2)).run()
    assert found.tokens == 50 * 400
    assert found.tokens / found.steps == pytest.approx(1 + 0.5 + 0.25, rel=0.02)
    machine = scenario.machine
    rows = found.drafted + found.steps
    context = sum(machine.token * position for position in range(1, 401)) * 50 / (found.tokens / found.steps)
    assert found.seconds == pytest.approx(
        found.steps * machine.base + machine.row * (rows - found.steps) + context, rel=0.02
    )
