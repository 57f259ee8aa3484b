"""How often never-slower decides wrongly, by simulation of its rounds and looks."""

from __future__ import annotations

import math
import random

import pytest

from foretell.bench.never_slower_grid import QUICK, CellSettings
from foretell.bench.never_slower_stats import MIN_OF_PLAIN, CellTimes, NeverSlowerVerdict

RUNS = 400
MOST_WRONG = 0.075  # at a true error of 5%, 400 runs give more once in fifty


def decide(rng: random.Random, true: float, noise: float, settings: CellSettings) -> CellTimes:
    """Measure a cell whose speedup is `true`, next to fixed lengths that are slower than plain decoding."""
    plain: list[float] = []
    adaptive: list[float] = []
    fixed: dict[int, list[float]] = {length: [] for length in settings.lengths}
    for number in range(1, settings.max_rounds + 1):
        plain.append(math.exp(rng.gauss(0, noise)))
        adaptive.append(math.exp(rng.gauss(0, noise)) / true)
        for times in fixed.values():
            times.append(math.exp(rng.gauss(0, noise)) / 0.8)
        found = CellTimes([plain], [adaptive], {k: [times] for k, times in fixed.items()}, looks=len(settings.looks))
        if number in settings.looks and found.verdict != "inconclusive":
            break
    return found


def shares(true: float, noise: float, settings: CellSettings) -> dict[NeverSlowerVerdict, float]:
    rng = random.Random(f"{true} {noise} {settings}")
    verdicts = [decide(rng, true, noise, settings).verdict for _ in range(RUNS)]
    return {each: verdicts.count(each) / RUNS for each in ("held", "slower", "inconclusive")}


@pytest.mark.parametrize("settings", [QUICK, CellSettings()], ids=["quick", "whole"])
@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04])
def test_a_cell_below_its_bar_rarely_passes(settings: CellSettings, noise: float) -> None:
    assert shares(0.95, noise, settings)["held"] <= 0.05


@pytest.mark.parametrize("settings", [QUICK, CellSettings()], ids=["quick", "whole"])
@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_a_cell_at_its_bar_is_decided_wrongly_as_often_as_documented(settings: CellSettings, noise: float) -> None:
    found = shares(MIN_OF_PLAIN, noise, settings)
    assert found["held"] <= MOST_WRONG and found["slower"] <= MOST_WRONG


@pytest.mark.parametrize("settings", [QUICK, CellSettings()], ids=["quick", "whole"])
def test_clear_cells_are_decided(settings: CellSettings) -> None:
    assert shares(1.0, 0.01, settings)["held"] >= 0.9
    assert shares(0.9, 0.02, settings)["slower"] >= 0.9


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
    assert CellSettings(rounds=rounds, max_rounds=most).looks == looks
