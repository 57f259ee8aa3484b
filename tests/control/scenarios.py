"""Scenarios to try controllers in."""

from __future__ import annotations

from functools import partial
from itertools import count

from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import StepCosts
from foretell.control.settings import ControllerSettings, DrafterTraits
from tests.control.simulation import Arm, Chance, Machine, Result, Scenario, World

GPU = Machine(base=0.01, row=0.01 * 0.08 / 63, token=1e-8)  # 64 rows cost 1.08 times one


def steady(rate: float) -> Chance:
    return lambda request, place: rate


def drawn(request: int) -> float:
    return 1.0


def free(chance: Chance, machine: Machine = Machine(), **settings: object) -> Scenario:
    return Scenario((Arm("free", chance),), machine, **settings)  # type: ignore[arg-type]


def model(chance: Chance, seconds: float, machine: Machine = Machine(), **settings: object) -> Scenario:
    return Scenario((Arm("model", chance, seconds, free=False),), machine, **settings)  # type: ignore[arg-type]


def slow_to_begin(start: float) -> Scenario:
    """A draft model on a machine where rows cost next to nothing, and to ask it at all costs so much of a step."""
    arm = Arm("model", steady(0.85), 0.2 * GPU.base, free=False, start=start * GPU.base)
    return Scenario((arm,), GPU, requests=24)


def beside(copies: float, heads: Chance, seconds: float, **settings: object) -> Scenario:
    """A free drafter that is right so often, and a head that takes time, on a machine with a small model."""
    arms = (Arm("free", steady(copies)), Arm("head", heads, seconds, free=False, others=(0.2, 0.1), node=0.05))
    return Scenario(arms, Machine(base=0.006, row=0.0003), **settings)  # type: ignore[arg-type]


def head(chance: Chance, seconds: float, machine: Machine, rescued: float = 0.6, **settings: object) -> Scenario:
    """One that makes trees: of the tokens that its first choice misses its others find so many."""
    others = tuple(rescued * share for share in (0.45, 0.22, 0.13, 0.08, 0.07, 0.05))
    arm = Arm("head", chance, seconds, False, others, 0.05)
    return Scenario((arm,), machine, **settings)  # type: ignore[arg-type]


WORN = Machine(base=0.01, row=0.0001, token=1e-8)  # and here 1.6 times
CPU = Machine(base=0.008, row=0.0015)
# Where trees should win, and where they must not hurt.
TREES = {
    **{f"gpu {rate}": head(steady(rate), 0.0006, GPU) for rate in (0.4, 0.6, 0.75)},
    "gpu, dear levels": head(steady(0.6), 0.0025, GPU),
    "gpu, from text to text": head(lambda request, place: 0.7 if (request // 10) % 2 else 0.4, 0.0006, GPU),
}
CHAINS = {
    **{f"cpu {rate}": head(steady(rate), 0.0006, CPU) for rate in (0.05, 0.3, 0.6, 0.9)},
    "cpu, dear levels": head(steady(0.6), 0.003, CPU),
    "cpu, many others": head(steady(0.5), 0.0006, CPU, rescued=0.9),
    "gpu, batch 64": head(steady(0.6), 0.0006, Machine(0.01, 0.0002, 1e-8), load=lambda begun: 64, requests=192),
    "gpu, useless": head(steady(0.02), 0.0006, WORN, rescued=0.02),
    "gpu, no others": head(steady(0.7), 0.0006, WORN, rescued=0.02),
    "gpu, load of 1 and 64": head(
        steady(0.6), 0.0006, WORN, requests=140, load=lambda begun: 64 if (begun // 64) % 2 else 1
    ),
}  # fmt: skip

STATIONARY = {
    **{f"free {rate}": free(steady(rate)) for rate in (0.05, 0.3, 0.6, 0.95)},
    **{f"free, dear rows {rate}": free(steady(rate), Machine(row=0.012)) for rate in (0.3, 0.8, 0.95)},
    **{
        f"free, batch 16, {rate}": free(steady(rate), Machine(row=0.004), load=lambda begun: 16) for rate in (0.05, 0.8)
    },
    **{f"model {rate}": model(steady(rate), 0.01) for rate in (0.3, 0.6, 0.95)},
    "dear model": model(steady(0.8), 0.02, Machine(row=0.003)),
    **{f"model, slow to begin {start}": slow_to_begin(start) for start in (0.1, 1.0)},
    "useless model": model(steady(0.02), 0.01),
    "free and model": Scenario((Arm("free", steady(0.3)), Arm("model", steady(0.75), 0.008, free=False))),
    "a head that does not pay where tokens are drawn": beside(0.08, steady(0.15), 0.002, temperature=drawn),
    "a cheap head where tokens are drawn": beside(0.1, steady(0.35), 0.0005, temperature=drawn),
    "a head that outdoes a free one": beside(0.35, steady(0.7), 0.0005),
    "restless machine": free(steady(0.5), Machine(row=0.006, noise=0.3, hiccup=0.1)),
}

DRIFTING = {
    "within a text": free(lambda request, place: 0.9 if (place // 40) % 2 else 0.1, Machine(row=0.004)),
    "from text to text": free(lambda request, place: 0.9 if (request // 10) % 2 else 0.1, Machine(row=0.004)),
    "a model from text to text": model(
        lambda request, place: 0.9 if (request // 10) % 2 else 0.1, 0.008, Machine(row=0.002)
    ),
    "adversary": free(lambda request, place: 0.95 if place % 7 < 2 else 0.02, Machine(row=0.006)),
    "a head for greedy texts, every other of which is drawn": beside(
        0.1,
        lambda request, place: 0.12 if request % 2 else 0.65,
        0.0015,
        temperature=lambda request: float(request % 2),
    ),
    "bursts": free(steady(0.4), Machine(row=0.005), load=lambda begun: 32 if begun % 20 < 5 else 2),
    "load of 1 and 64": free(
        steady(0.6), Machine(row=0.003), requests=140, load=lambda begun: 64 if (begun // 64) % 2 else 1
    ),
    "a model under load of 1 and 64": model(
        steady(0.7), 0.006, Machine(row=0.003), requests=140, load=lambda begun: 64 if (begun // 64) % 2 else 1
    ),
}


def adaptive(
    scenario: Scenario, settings: ControllerSettings = ControllerSettings(), knowing: bool = True
) -> AdaptiveController:
    """One whose looks take a tenth of a millisecond each, whatever this machine does; it knows what steps are filled up
    to."""
    traits = {  # the world's drafts take what the levels take that were asked for
        arm.name: DrafterTraits(arm.free, not arm.free and not arm.others, grows=bool(arm.others), whole=True)
        for arm in scenario.arms
    }
    costs = StepCosts(sizes=scenario.machine.sizes if knowing else ())
    return AdaptiveController(traits, settings, costs, clock=partial(next, count(0.0, 1e-4)))


def adapted(scenario: Scenario, settings: ControllerSettings = ControllerSettings(), knowing: bool = True) -> Result:
    return World(scenario, adaptive(scenario, settings, knowing)).run()
