"""How often never-slower decides wrongly, by simulation of its rounds and looks."""

from __future__ import annotations

import math
import random

import pytest

from foretell.bench.never_slower_grid import QUICK, CellPlan
from foretell.bench.never_slower_stats import MIN_OF_PLAIN, CellTimes, NeverSlowerVerdict

RUNS = 400
MOST_WRONG = 0.075  # at a true error of 5%, 400 runs give more once in fifty


def decide(rng: random.Random, true: float, noise: float, plan: CellPlan) -> CellTimes:
    """Measure a cell whose speedup is `true`, next to fixed lengths that are slower than plain decoding."""
    plain: list[float] = []
    adaptive: list[float] = []
    fixed: dict[int, list[float]] = {length: [] for length in plan.lengths}
    for number in range(1, plan.max_rounds + 1):
        plain.append(math.exp(rng.gauss(0, noise)))
        adaptive.append(math.exp(rng.gauss(0, noise)) / true)
        for times in fixed.values():
            times.append(math.exp(rng.gauss(0, noise)) / 0.8)
        found = CellTimes([plain], [adaptive], {k: [times] for k, times in fixed.items()}, looks=len(plan.looks))
        if number in plan.looks and found.verdict != "inconclusive":
            break
    return found


def shares(true: float, noise: float, plan: CellPlan) -> dict[NeverSlowerVerdict, float]:
    rng = random.Random(f"{true} {noise} {plan}")
    verdicts = [decide(rng, true, noise, plan).verdict for _ in range(RUNS)]
    return {each: verdicts.count(each) / RUNS for each in ("held", "slower", "inconclusive")}


@pytest.mark.parametrize("plan", [QUICK, CellPlan()], ids=["quick", "whole"])
@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04])
def test_a_cell_below_its_bar_rarely_passes(plan: CellPlan, noise: float) -> None:
    assert shares(0.95, noise, plan)["held"] <= 0.05


@pytest.mark.parametrize("plan", [QUICK, CellPlan()], ids=["quick", "whole"])
@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_a_cell_at_its_bar_is_decided_wrongly_as_often_as_documented(plan: CellPlan, noise: float) -> None:
    found = shares(MIN_OF_PLAIN, noise, plan)
    assert found["held"] <= MOST_WRONG and found["slower"] <= MOST_WRONG


@pytest.mark.parametrize("plan", [QUICK, CellPlan()], ids=["quick", "whole"])
def test_clear_cells_are_decided(plan: CellPlan) -> None:
    assert shares(1.0, 0.01, plan)["held"] >= 0.9
    assert shares(0.9, 0.02, plan)["slower"] >= 0.9


def test_the_interval_holds_its_level_whichever_look_it_stopped_at() -> None:
    rng = random.Random(4)
    between = [decide(rng, 1.0, 0.02, QUICK).speedup_interval for _ in range(RUNS)]
    covered = sum(each is not None and each[0] <= 1.0 <= each[1] for each in between)
    assert covered / RUNS >= 0.93


@pytest.mark.parametrize(
    ("rounds", "most", "looks"),
    [(4, 8, (4, 8)), (4, 9, (4, 9)), (3, 3, (3,)), (3, 5, (3, 5)), (1, 1, (1,)), (3, 50, (3, 6, 12, 24, 50))],
)
def test_looks_double_up_to_the_most_rounds(rounds: int, most: int, looks: tuple[int, ...]) -> None:
    assert CellPlan(rounds=rounds, max_rounds=most).looks == looks
