"""What each mechanism of the controller is worth: python bench/ablation.py [--traces FILE@TEMPERATURE ...]

Switches one mechanism off at a time and compares total time with the whole controller, in the simulator's scenarios
and, with --traces, in replays of drafts that bench/replay.py recorded. Prints Markdown with 95% t intervals over
scenarios and seeds, or over requests.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import replay  # noqa: E402
from foretell.bench.intervals import t_quantile  # noqa: E402
from foretell.control import adaptive as control  # noqa: E402
from foretell.control.settings import ControllerSettings, ControllerTuning  # noqa: E402
from tests.control.scenarios import CHAINS, DRIFTING, STATIONARY, TREES, adaptive  # noqa: E402
from tests.control.simulation import Scenario, Simulator  # noqa: E402

USUAL = ControllerTuning()
SCENARIOS = {"scenarios": {**STATIONARY, **DRIFTING}, "scenarios for trees": {**TREES, **CHAINS}}


@dataclass(frozen=True)
class Without:
    """The controller without one mechanism."""

    name: str
    tuning: ControllerTuning = USUAL
    max_tree_nodes: int = 64
    one_class: bool = False  # all requests share one class
    no_priors: bool = False  # acceptance starts at 0.5 whatever the drafter
    no_costs: bool = False  # costs are not measured at start


MECHANISMS = (
    Without("whole controller"),
    Without("optimism bonus", replace(USUAL, optimism=0.0)),
    Without("limit of optimism in a request", replace(USUAL, optimism_share=1e9)),
    Without("probes of unused drafters", replace(USUAL, probe_time_share=1e-12)),
    Without("poll limiter", replace(USUAL, poll_refill_share=1.0, poll_refill_seconds=1.0)),
    Without("threshold of a branch", replace(USUAL, min_probability_factor=0.0)),
    Without("odds of a request", replace(USUAL, request_prior=1e9)),
    Without("request classes", one_class=True),
    Without("confidence of free drafts", replace(USUAL, confidence_trust=0.0, cross_trust=0.0)),
    Without("trees", max_tree_nodes=0),
    Without("priors by depth", no_priors=True),
    Without("costs measured at start", no_costs=True),
)


def seconds(job: tuple[Without, str, str, int]) -> float:
    """Return the time of a scenario, given by its group, its name and a seed."""
    without, group, name, seed = job
    with_classes(without)
    scenario: Scenario = replace(SCENARIOS[group][name], requests=24, seed=seed)
    controller = adaptive(scenario, ControllerSettings(max_tree_nodes=without.max_tree_nodes), tuning=without.tuning)
    return Simulator(scenario, controller).run().seconds


def with_classes(without: Without) -> None:
    control.request_class_of = (lambda seq: "greedy") if without.one_class else CLASS_OF


CLASS_OF = control.request_class_of


def replayed(job: tuple[Without, Path, float]) -> list[float]:
    """Return the seconds per token of each request, seen first."""
    without, file, temperature = job
    with_classes(without)
    found, names = [], ("suffix", "recycle", "eagle")
    traits = {name: replay.TRAITS[name] for name in names}
    if without.no_priors:
        traits = {name: replace(each, prior_acceptance=0.5, acceptance_by_depth=()) for name, each in traits.items()}
    for trace in replay.load(file):
        if without.no_costs:
            controller = control.AdaptiveController(traits, tuning=without.tuning)
        else:
            controller = replay.learned(names, replay.CPU, traits=traits, tuning=without.tuning)
        found += replay.play([trace], controller, names, temperature=temperature).seconds
    return found


def interval(whole: list[float], without: list[float]) -> str:
    """Return what the mechanism saves, as the mean and t interval of the log ratio of times."""
    logs = [math.log(other / mine) for mine, other in zip(whole, without, strict=True)]
    half = t_quantile(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return f"{100 * fmean(logs):+.1f}% ({100 * (fmean(logs) - half):+.1f} to {100 * (fmean(logs) + half):+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--traces", nargs="*", default=[], metavar="FILE@TEMPERATURE")
    args = parser.parse_args()
    columns: dict[str, Callable[[Without], list[float]]] = {}
    pool = Pool(2)
    for group, known in SCENARIOS.items():
        jobs = [(group, name, seed) for name in known for seed in range(args.seeds)]
        columns[group] = lambda without, jobs=jobs: pool.map(seconds, [(without, *job) for job in jobs], chunksize=1)
    for named in args.traces:
        file, _, temperature = named.partition("@")
        columns[f"first requests, T={temperature}"] = lambda without, job=(Path(file), float(temperature)): pool.map(
            replayed, [(without, *job)]
        )[0]
    print(f"| without | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    whole = {title: measure(MECHANISMS[0]) for title, measure in columns.items()}
    for without in MECHANISMS[1:]:
        of_texts = without.no_priors or without.no_costs
        cells = [
            "" if title in SCENARIOS and of_texts else interval(whole[title], measure(without))
            for title, measure in columns.items()
        ]
        print(f"| {without.name} | {' | '.join(cells)} |", flush=True)
    pool.terminate()


if __name__ == "__main__":
    main()
