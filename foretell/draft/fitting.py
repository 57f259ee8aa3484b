"""Which drafters fit into memory beside the target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from foretell.config import SpeculationConfig
from foretell.errors import CapacityError
from foretell.runner.memory import MemoryPlan

LOG = logging.getLogger("foretell")

Planner = Callable[[SpeculationConfig], MemoryPlan]


def fit(config: SpeculationConfig, names: tuple[str, ...], heavy: tuple[str, ...], plan: Planner) -> SpeculationConfig:
    """The config without those of the `heavy` drafters that would leave too little room for the texts themselves.

    Of several the last named goes first. Where not even the target fits alone, that is refused.
    """
    left = list(names)
    plan(_only(config, [name for name in left if name not in heavy]))
    for name in reversed(heavy):
        try:
            plan(config if len(left) == len(names) else _only(config, left))
            break
        except CapacityError as error:
            left.remove(name)
            rest = f"{', '.join(left)} can do without it" if left else "texts are written without guesses"
            LOG.warning("%s is not loaded, for too little memory would be left: %s; %s", name, error, rest)
    return config if len(left) == len(names) else _only(config, left)


def _only(config: SpeculationConfig, names: list[str]) -> SpeculationConfig:
    return replace(config, drafter=",".join(names) or "none")
