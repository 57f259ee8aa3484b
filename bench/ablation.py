"""What each mechanism of the controller is worth: python bench/ablation.py --traces FILE@TEMPERATURE@DRAFTERS@MACHINE

Switches one mechanism off at a time and compares total time with the whole controller, in the simulator's scenarios
and, with --traces, in replays of drafts that bench/replay.py recorded: each request seen first, or 16 at a time. Prints
Markdown with 95% t intervals over scenarios and seeds, or over requests.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import replay  # noqa: E402
from foretell.bench.intervals import t_quantile  # noqa: E402
from foretell.control import acceptance_model, adaptive, choice  # noqa: E402
from foretell.control.settings import ControllerSettings, ControllerTuning  # noqa: E402
from tests.control import scenarios  # noqa: E402
from tests.control.simulation import Scenario, Simulator  # noqa: E402

USUAL = ControllerTuning()
SCENARIOS = {
    "scenarios": {**scenarios.STATIONARY, **scenarios.DRIFTING},
    "scenarios for trees": {**scenarios.TREES, **scenarios.CHAINS},
}
BATCH = 16


def no_classes() -> None:
    """Let requests of all temperatures share their rates."""
    acceptance_model.temperature_power = lambda temperature: 1.0


def no_allocation() -> None:
    """Give each sequence its best draft, as if all others drafted alike."""

    def each_alone(view: Any, options: Any, margin: float, *rest: Any) -> list[choice.Choice]:
        return [choice.best_choice(view, mine, margin) for mine in options]

    adaptive.choose = each_alone  # type: ignore[assignment]


def no_fewer() -> None:
    """Do not try whether fewer timed drafters are faster for the batch."""
    choice.fewer_drafters = lambda *given: iter(())


def no_levels() -> None:
    """Keep the prior of what a tree level finds."""
    acceptance_model.AcceptanceRates.count_level = lambda *given: None  # type: ignore[method-assign]


@dataclass(frozen=True)
class Without:
    """The controller without one mechanism."""

    name: str
    tuning: ControllerTuning = USUAL
    max_tree_nodes: int = 64
    patch: Callable[[], None] | None = None
    no_priors: bool = False  # acceptance starts at 0.5 whatever the drafter
    no_costs: bool = False  # costs are not measured at start


MECHANISMS = (
    Without("whole controller"),
    Without("optimistic prior", replace(USUAL, optimistic_prior=0.0)),
    Without("probes of unused drafters", replace(USUAL, probe_time_share=1e-12)),
    Without("poll limiter", replace(USUAL, poll_refill_share=1.0, poll_refill_seconds=1.0)),
    Without("threshold of a branch", replace(USUAL, min_probability_factor=0.0)),
    Without("decay of counts", replace(USUAL, memory=1e9)),
    Without("classes of temperature", patch=no_classes),
    Without("confidence of free drafts", replace(USUAL, confidence_trust=0.0)),
    Without("discount of free drafts", replace(USUAL, free_discount=1.0)),
    Without("trees", max_tree_nodes=0),
    Without("learned tree levels", patch=no_levels),
    Without("allocation over the batch", patch=no_allocation),
    Without("fewer timed drafters", patch=no_fewer),
    Without("priors of drafters", no_priors=True),
    Without("costs measured at start", no_costs=True),
)


def scenario_seconds(job: tuple[Without, str, str, int]) -> list[float]:
    """Return the time of a scenario, given by its group, its name and a seed."""
    without, group, name, seed = job
    scenario: Scenario = replace(SCENARIOS[group][name], requests=24, seed=seed)
    settings = ControllerSettings(max_tree_nodes=without.max_tree_nodes)
    return [Simulator(scenario, scenarios.adaptive(scenario, settings, tuning=without.tuning)).run().seconds]


@dataclass(frozen=True)
class Traces:
    """Recorded traces, and the machine they are played on."""

    file: Path
    temperature: float
    drafters: tuple[str, ...]
    machine: str
    batch: int  # 1: each request has a controller of its own

    @classmethod
    def parse(cls, named: str, batch: int) -> Traces:
        file, temperature, drafters, machine = named.split("@")
        return cls(Path(file), float(temperature), tuple(drafters.split(",")), machine, batch)

    def __str__(self) -> str:
        what = "first requests" if self.batch == 1 else f"batch {self.batch}"
        return f"{what}, {self.machine}, T={self.temperature:g}, {', '.join(self.drafters)}"


def replay_seconds(job: tuple[Without, Traces]) -> list[float]:
    """Return the seconds per token of each request."""
    without, played = job
    machine, names, recorded = replay.MACHINES[played.machine], played.drafters, replay.load(played.file)
    traits = {name: replay.TRAITS[name] for name in names}
    if without.no_priors:
        traits = {name: replace(each, prior_acceptance=0.5, acceptance_by_depth=()) for name, each in traits.items()}

    def controller() -> adaptive.AdaptiveController:
        if without.no_costs:
            return adaptive.AdaptiveController(traits, tuning=without.tuning)
        return replay.learned(names, machine, traits=traits, tuning=without.tuning)

    if played.batch > 1:
        order = random.Random(0).sample(recorded, len(recorded))
        return replay.play(order, controller(), names, machine, played.batch, played.temperature).seconds
    return [
        replay.play([each], controller(), names, machine, temperature=played.temperature).seconds[0]
        for each in recorded
    ]


def run(job: tuple[Callable[[Any], list[float]], Any]) -> list[float]:
    """Run one job in a process of its own, which a patch may change."""
    measure, given = job
    if given[0].patch is not None:
        given[0].patch()
    return measure(given)


def interval(whole: list[float], without: list[float]) -> str:
    """Return what the mechanism saves, as the mean and t interval of the log ratio of times."""
    logs = [math.log(other / mine) for mine, other in zip(whole, without, strict=True)]
    half = t_quantile(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return f"{100 * fmean(logs):+.1f}% ({100 * (fmean(logs) - half):+.1f} to {100 * (fmean(logs) + half):+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--traces", nargs="*", default=[], metavar="FILE@TEMPERATURE@DRAFTERS@MACHINE")
    args = parser.parse_args()
    columns: dict[str, list[tuple[Callable[[Any], list[float]], tuple[Any, ...]]]] = {
        group: [(scenario_seconds, (group, name, seed)) for name in known for seed in range(args.seeds)]
        for group, known in SCENARIOS.items()
    }
    for named in args.traces:
        for played in (Traces.parse(named, 1), Traces.parse(named, BATCH)):
            columns[str(played)] = [(replay_seconds, (played,))]
    print(f"| without | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    whole: dict[str, list[float]] = {}
    with Pool(2, maxtasksperchild=1) as pool:
        for without in MECHANISMS:
            jobs = [(measure, (without, *given)) for column in columns.values() for measure, given in column]
            results = iter(pool.map(run, jobs, chunksize=1))
            cells = []
            for title, column in columns.items():
                seconds = [value for _ in column for value in next(results)]
                whole.setdefault(title, seconds)
                skipped = title in SCENARIOS and (without.no_priors or without.no_costs)
                cells.append("" if skipped else interval(whole[title], seconds))
            if without is not MECHANISMS[0]:
                print(f"| {without.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
