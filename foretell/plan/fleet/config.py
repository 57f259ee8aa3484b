"""Options of `foretell plan fleet`, and the simulation they describe."""

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

MIN_REQUESTS, MAX_REQUESTS = 20, 2_000_000


@strict
@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Options of `foretell plan fleet`: traffic, replicas and SLOs."""

    rate: float | None = option(None, "mean requests per second", common=True)
    replicas: int | None = option(
        None, "replicas of the model, each on --count devices (default: the fewest that meet the SLOs)", common=True
    )
    prompt: float = option(1024, "mean prompt length in tokens", common=True)
    output: float = option(256, "mean output length in tokens", common=True)
    lengths: str = option("lognormal", "distribution of both lengths", choices=LENGTHS)
    arrivals: str = option("poisson", "arrival process", choices=ARRIVALS, common=True)
    burst: float = option(3.0, "with bursty arrivals: rate in a burst over the mean rate")
    prefixes: int = option(0, "number of shared prompt prefixes (Zipf distributed); 0 for none")
    prefix_tokens: float = option(512, "tokens of a shared prefix, part of the prompt")
    routing: str = option("least-loaded", "routing policy", choices=ROUTES, common=True)
    speculation: str = option("load", "speculation always on, off, or by load", choices=SPECULATION, common=True)
    max_num_seqs: int = option(64, "largest batch of a replica")
    ttft: float | None = option(None, "SLO: p99 time to first token in seconds", common=True)
    tpot: float | None = option(None, "SLO: p99 time per output token in seconds", common=True)
    seconds: float = option(600.0, "simulated seconds")
    seed: int = option(0, "random seed")

    def __post_init__(self) -> None:
        if self.rate is None:
            raise RequestError("rate", "is missing; give requests per second, such as --rate 5")
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
            raise RequestError("burst", f"must be {1 / BUSY_SHARE:g} or less: bursts are a fifth of the time")
        self._check_requests(self.rate * self.seconds)

    def _check_requests(self, expected: float) -> None:
        if expected < MIN_REQUESTS:
            raise RequestError("seconds", f"give {expected:.0f} requests, which is too few; raise seconds or rate")
        if expected > MAX_REQUESTS:
            raise RequestError(
                "seconds", f"give {expected:.0f} requests, at most {MAX_REQUESTS} are allowed; lower seconds or rate"
            )

    @property
    def traffic(self) -> TrafficModel:
        assert self.rate is not None, "checked where the config was made"
        shared = self.prefix_tokens if self.prefixes else 0.0
        arrivals, lengths = cast(Arrivals, self.arrivals), cast(Lengths, self.lengths)
        return TrafficModel(self.rate, self.prompt, self.output, arrivals, self.burst, lengths, self.prefixes, shared)


def trial_of(config: PlanConfig, fleet: FleetConfig, inputs: PlanInputs) -> FleetTrial:
    """Return the simulation of a fleet, ready to run with any number of replicas."""
    traffic = fleet.traffic
    max_num_seqs, max_prefixes = cache_capacity(config, fleet, inputs)
    spec = FleetSpec(1, _service_times(config, fleet, inputs, max_num_seqs), max_prefixes, traffic.prefix_tokens)
    requests = generate_requests(traffic, fleet.seconds, fleet.seed)
    price = config.count * inputs.target.device.price
    return FleetTrial(spec, requests, fleet.routing, fleet.seconds, fleet.seed, FleetSlo(fleet.ttft, fleet.tpot), price)


def cache_capacity(config: PlanConfig, fleet: FleetConfig, inputs: PlanInputs) -> tuple[int, int]:
    """Return the largest batch of a replica, and the prefixes that fit into the rest of its KV cache."""
    context = math.ceil(fleet.prompt + fleet.output)
    length = config.max_draft if config.length is None else config.length
    memory = plan_memory(inputs.target, inputs.drafter, 1, context, length)
    if memory.max_batch < 1:
        raise CapacityError(
            f"a replica on {config.count} x {inputs.target.device.name} has no memory for one sequence "
            f"of {context} tokens; "
            "take more devices (--count), fewer bits (--dtype) or a smaller model"
        )
    max_num_seqs = min(fleet.max_num_seqs, memory.max_batch)
    left = memory.usable - memory.weights - memory.draft - memory.workspace - max_num_seqs * memory.kv_per_sequence
    prefix_bytes = fleet.prefix_tokens * (inputs.target.kv_bytes_per_token + inputs.drafter.kv_bytes_per_token)
    return max_num_seqs, int(left // prefix_bytes) if fleet.prefixes and prefix_bytes else 0


def _service_times(config: PlanConfig, fleet: FleetConfig, inputs: PlanInputs, max_num_seqs: int) -> ServiceTimes:
    return service_times(
        inputs.target,
        inputs.drafter,
        max_num_seqs,
        fleet.prompt + fleet.output / 2,
        fleet.prompt,
        config.acceptance,
        config.max_draft,
        cast(Speculation, fleet.speculation),
        config.length,
    )
