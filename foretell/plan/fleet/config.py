"""What a user says of a fleet, and the trial that comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from foretell.errors import CapacityError, RequestError
from foretell.options import option, strict

from ..config import PlanConfig, PlanInputs
from ..memory import plan_memory
from .arrivals import ARRIVALS, BUSY_SHARE, LENGTHS, Arrivals, Lengths, TrafficModel, generate_requests
from .service_time import SPECULATION, ServiceTimes, Speculation, service_times
from .simulate import ROUTES, FleetSpec
from .sizing import FleetSlo, FleetTrial

FEWEST_CALLS, MOST_CALLS = 20, 2_000_000


@strict
@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Who comes, and how they are served."""

    rate: float | None = option(None, "requests a second, in the mean")
    replicas: int | None = option(None, "copies of the model, each on --count devices (default: as few as do)")
    prompt: float = option(1024, "tokens of a prompt, in the mean")
    output: float = option(256, "tokens of an answer, in the mean")
    lengths: str = option("lognormal", "how both are spread", choices=LENGTHS)
    arrivals: str = option("poisson", "how requests come", choices=ARRIVALS)
    burst: float = option(3.0, "bursty: how many times the mean rate comes in a burst")
    prefixes: int = option(0, "beginnings that prompts share, by popularity; 0 is none")
    prefix_tokens: float = option(512, "tokens of such a beginning, part of the prompt")
    routing: str = option("least-loaded", "which copy a request is sent to", choices=ROUTES)
    speculation: str = option("load", "guess always, never, or as far as the load lets it pay", choices=SPECULATION)
    max_num_seqs: int = option(64, "the most texts a copy writes at once")
    ttft: float | None = option(None, "seconds to the first token that 99 of 100 must not exceed")
    tpot: float | None = option(None, "seconds a later token, likewise")
    seconds: float = option(600.0, "of time in the simulation")
    seed: int = option(0, "decides all chance")

    def __post_init__(self) -> None:
        if self.rate is None:
            raise RequestError("rate", "is not said; give requests a second, such as --rate 5")
        positive = ("rate", "replicas", "output", "burst", "max_num_seqs", "ttft", "tpot", "seconds")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, f"must be above 0, not {value:g}")
        for name in ("prompt", "prefixes", "prefix_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(name, f"must be 0 or more, not {getattr(self, name):g}")
        if self.prefixes and self.prefix_tokens >= self.prompt:
            raise RequestError("prefix_tokens", f"must be fewer than the prompt's {self.prompt:g}")
        if self.burst > 1 / BUSY_SHARE:
            raise RequestError("burst", f"must be {1 / BUSY_SHARE:g} or less: a burst lasts a fifth of the time")
        self._check_calls(self.rate * self.seconds)

    def _check_calls(self, expected: float) -> None:
        if expected < FEWEST_CALLS:
            raise RequestError("seconds", f"leave {expected:.0f} requests, too few to tell; raise seconds or rate")
        if expected > MOST_CALLS:
            raise RequestError("seconds", f"make {expected:.0f} requests, {MOST_CALLS} at most; lower seconds or rate")

    @property
    def demand(self) -> TrafficModel:
        assert self.rate is not None, "checked where the config was made"
        shared = self.prefix_tokens if self.prefixes else 0.0
        arrivals, lengths = cast(Arrivals, self.arrivals), cast(Lengths, self.lengths)
        return TrafficModel(self.rate, self.prompt, self.output, arrivals, self.burst, lengths, self.prefixes, shared)


def trial_of(config: PlanConfig, fleet: FleetConfig, parts: PlanInputs) -> FleetTrial:
    """Everything a fleet of any size is tried with."""
    demand = fleet.demand
    seats, known = room_for(config, fleet, parts)
    copies = FleetSpec(1, _pace(config, fleet, parts, seats), known, demand.prefix_tokens)
    coming = generate_requests(demand, fleet.seconds, fleet.seed)
    price = config.count * parts.target.device.price
    return FleetTrial(copies, coming, fleet.routing, fleet.seconds, fleet.seed, FleetSlo(fleet.ttft, fleet.tpot), price)


def room_for(config: PlanConfig, fleet: FleetConfig, parts: PlanInputs) -> tuple[int, int]:
    """Texts that a copy can write at once, and prompts' beginnings that it can keep beside them."""
    context = math.ceil(fleet.prompt + fleet.output)
    length = config.max_draft if config.length is None else config.length
    memory = plan_memory(parts.target, parts.drafter, 1, context, length)
    if memory.max_batch < 1:
        raise CapacityError(
            f"a copy on {config.count} x {parts.target.device.name} has no room for one text of {context} tokens; "
            "take more devices (--count), fewer bits (--dtype) or a smaller model"
        )
    seats = min(fleet.max_num_seqs, memory.max_batch)
    left = memory.usable - memory.weights - memory.draft - memory.workspace - seats * memory.kv_per_sequence
    beginning = fleet.prefix_tokens * (parts.target.kv_bytes_per_token + parts.drafter.kv_bytes_per_token)
    return seats, int(left // beginning) if fleet.prefixes and beginning else 0


def _pace(config: PlanConfig, fleet: FleetConfig, parts: PlanInputs, seats: int) -> ServiceTimes:
    return service_times(
        parts.target,
        parts.drafter,
        seats,
        fleet.prompt + fleet.output / 2,
        fleet.prompt,
        config.acceptance,
        config.max_draft,
        cast(Speculation, fleet.speculation),
        config.length,
    )
