"""Scenarios for the simulator of controllers."""

from __future__ import annotations

from functools import partial
from itertools import count

from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import ControllerSettings, ControllerTuning
from foretell.types import DrafterTraits
from tests.control.simulation import AcceptanceFn, Machine, Scenario, SimulatedDrafter, SimulationResult, Simulator

GPU = Machine(base=0.01, row=0.01 * 0.08 / 63, token=1e-8)  # 64 rows cost 1.08 times one


def steady(rate: float) -> AcceptanceFn:
    return lambda request, position: rate


def sampled(request: int) -> float:
    return 1.0


def free(acceptance: AcceptanceFn, machine: Machine = Machine(), **settings: object) -> Scenario:
    return Scenario((SimulatedDrafter("free", acceptance),), machine, **settings)  # type: ignore[arg-type]


def model(acceptance: AcceptanceFn, seconds: float, machine: Machine = Machine(), **settings: object) -> Scenario:
    drafter = SimulatedDrafter("model", acceptance, seconds, free=False)
    return Scenario((drafter,), machine, **settings)  # type: ignore[arg-type]


def slow_to_start(start: float) -> Scenario:
    """Return a draft model with a start cost, as a share of a step, on a machine where rows are nearly free."""
    drafter = SimulatedDrafter("model", steady(0.85), 0.2 * GPU.base, free=False, start=start * GPU.base)
    return Scenario((drafter,), GPU, requests=24)


def free_and_head(free_rate: float, head: AcceptanceFn, seconds: float, **settings: object) -> Scenario:
    """Return a free drafter and a head that takes time, on a machine with a small model."""
    drafters = (
        SimulatedDrafter("free", steady(free_rate)),
        SimulatedDrafter("head", head, seconds, free=False, others=(0.2, 0.1), node_share=0.05),
    )
    return Scenario(drafters, Machine(base=0.006, row=0.0003), **settings)  # type: ignore[arg-type]


def head(
    acceptance: AcceptanceFn, seconds: float, machine: Machine, rescued: float = 0.6, **settings: object
) -> Scenario:
    """Return a drafter of trees whose further choices find this share of the tokens that its first choice misses."""
    others = tuple(rescued * share for share in (0.45, 0.22, 0.13, 0.08, 0.07, 0.05))
    drafter = SimulatedDrafter("head", acceptance, seconds, free=False, others=others, node_share=0.05)
    return Scenario((drafter,), machine, **settings)  # type: ignore[arg-type]


GPU_STEEPER = Machine(base=0.01, row=0.0001, token=1e-8)  # 64 rows cost 1.6 times one
CPU = Machine(base=0.008, row=0.0015)
# Where trees should win, and where they must not hurt.
TREES = {
    **{f"gpu {rate}": head(steady(rate), 0.0006, GPU) for rate in (0.4, 0.6, 0.75)},
    "gpu, expensive levels": head(steady(0.6), 0.0025, GPU),
    "gpu, varying between requests": head(lambda request, position: 0.7 if (request // 10) % 2 else 0.4, 0.0006, GPU),
}
CHAINS = {
    **{f"cpu {rate}": head(steady(rate), 0.0006, CPU) for rate in (0.05, 0.3, 0.6, 0.9)},
    "cpu, expensive levels": head(steady(0.6), 0.003, CPU),
    "cpu, many rescued": head(steady(0.5), 0.0006, CPU, rescued=0.9),
    "gpu, batch 64": head(steady(0.6), 0.0006, Machine(0.01, 0.0002, 1e-8), load=lambda started: 64, requests=192),
    "gpu, useless": head(steady(0.02), 0.0006, GPU_STEEPER, rescued=0.02),
    "gpu, none rescued": head(steady(0.7), 0.0006, GPU_STEEPER, rescued=0.02),
    "gpu, load of 1 and 64": head(
        steady(0.6), 0.0006, GPU_STEEPER, requests=140, load=lambda started: 64 if (started // 64) % 2 else 1
    ),
}  # fmt: skip

STATIONARY = {
    **{f"free {rate}": free(steady(rate)) for rate in (0.05, 0.3, 0.6, 0.95)},
    **{f"free, expensive rows {rate}": free(steady(rate), Machine(row=0.012)) for rate in (0.3, 0.8, 0.95)},
    **{
        f"free, batch 16, {rate}": free(steady(rate), Machine(row=0.004), load=lambda started: 16)
        for rate in (0.05, 0.8)
    },
    **{f"model {rate}": model(steady(rate), 0.01) for rate in (0.3, 0.6, 0.95)},
    "expensive model": model(steady(0.8), 0.02, Machine(row=0.003)),
    **{f"model, slow to start {start}": slow_to_start(start) for start in (0.1, 1.0)},
    "useless model": model(steady(0.02), 0.01),
    "free and model": Scenario(
        (SimulatedDrafter("free", steady(0.3)), SimulatedDrafter("model", steady(0.75), 0.008, free=False))
    ),
    "a head that does not pay at temperature 1": free_and_head(0.08, steady(0.15), 0.002, temperature=sampled),
    "a cheap head at temperature 1": free_and_head(0.1, steady(0.35), 0.0005, temperature=sampled),
    "a head that beats a free drafter": free_and_head(0.35, steady(0.7), 0.0005),
    "noisy machine": free(steady(0.5), Machine(row=0.006, noise=0.3, outliers=0.1)),
}

DRIFTING = {
    "within a request": free(lambda request, position: 0.9 if (position // 40) % 2 else 0.1, Machine(row=0.004)),
    "between requests": free(lambda request, position: 0.9 if (request // 10) % 2 else 0.1, Machine(row=0.004)),
    "a model between requests": model(
        lambda request, position: 0.9 if (request // 10) % 2 else 0.1, 0.008, Machine(row=0.002)
    ),
    "adversary": free(lambda request, position: 0.95 if position % 7 < 2 else 0.02, Machine(row=0.006)),
    "a head for greedy requests, with every other one sampled": free_and_head(
        0.1,
        lambda request, position: 0.12 if request % 2 else 0.65,
        0.0015,
        temperature=lambda request: float(request % 2),
    ),
    "bursts": free(steady(0.4), Machine(row=0.005), load=lambda started: 32 if started % 20 < 5 else 2),
    "load of 1 and 64": free(
        steady(0.6), Machine(row=0.003), requests=140, load=lambda started: 64 if (started // 64) % 2 else 1
    ),
    "a model under load of 1 and 64": model(
        steady(0.7), 0.006, Machine(row=0.003), requests=140, load=lambda started: 64 if (started // 64) % 2 else 1
    ),
}


def adaptive(
    scenario: Scenario,
    settings: ControllerSettings = ControllerSettings(),
    knows_sizes: bool = True,
    tuning: ControllerTuning = ControllerTuning(),
) -> AdaptiveController:
    """Return a controller whose polls take 0.1 ms each on a simulated clock."""
    traits = {  # simulated drafters draft all levels that were asked for
        each.name: DrafterTraits(
            is_free=each.free,
            needs_prefill=not each.free and not each.others,
            makes_trees=bool(each.others),
            single_graph=True,
        )
        for each in scenario.drafters
    }
    prior = CostPrior(row=scenario.machine.prior_row)
    costs = StepCosts(prior, scenario.machine.sizes if knows_sizes else (), tuning)
    clock = partial(next, count(0.0, 1e-4))
    return AdaptiveController(traits, settings, costs, clock=clock, tuning=tuning)


def run_adaptive(
    scenario: Scenario, settings: ControllerSettings = ControllerSettings(), knows_sizes: bool = True
) -> SimulationResult:
    return Simulator(scenario, adaptive(scenario, settings, knows_sizes)).run()
