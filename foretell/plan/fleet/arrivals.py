"""Request arrivals: times, lengths and shared prefixes."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Arrivals = Literal["poisson", "bursty"]
Lengths = Literal["fixed", "exponential", "lognormal"]
ARRIVALS, LENGTHS = ("poisson", "bursty"), ("fixed", "exponential", "lognormal")
BUSY_SHARE = 0.2  # share of time in bursts
BUSY_SECONDS = 10.0  # mean duration of a burst
SPREAD = 1.0  # standard deviation of the logarithm of lognormal lengths
POPULARITY = 1.0  # exponent of the Zipf distribution of prefixes


@dataclass(frozen=True)
class SimulatedRequest:
    """A request of the simulation. Prompt and output are in tokens."""

    number: int
    at: float  # arrival in seconds
    prompt: float
    output: float
    prefix: int | None = None  # shared prefix, by number


@dataclass(frozen=True)
class TrafficModel:
    """Arrival process and lengths. Lengths are means in tokens; a shared prefix is part of the prompt."""

    rate: float  # requests per second
    prompt: float
    output: float
    arrivals: Arrivals = "poisson"
    burst: float = 3.0  # arrival rate in a burst over the mean rate
    lengths: Lengths = "lognormal"
    prefixes: int = 0  # number of shared prefixes; 0 for none
    prefix_tokens: float = 0.0


def generate_requests(traffic: TrafficModel, seconds: float, seed: int) -> list[SimulatedRequest]:
    """Return the requests that arrive within `seconds`; the seed determines them."""
    times = random.Random(f"{seed} times")
    arrivals = _steady(traffic.rate, times) if traffic.arrivals == "poisson" else _in_bursts(traffic, times)
    sizes, sharing = random.Random(f"{seed} sizes"), random.Random(f"{seed} prefixes")
    weights = list(accumulate((i + 1) ** -POPULARITY for i in range(traffic.prefixes)))
    found: list[SimulatedRequest] = []
    for at in arrivals:
        if at >= seconds:
            return found
        own = _length(traffic.lengths, traffic.prompt - traffic.prefix_tokens, sizes)
        output = max(1.0, _length(traffic.lengths, traffic.output, sizes))
        prefix = bisect(weights, sharing.random() * weights[-1]) if weights else None
        shared = traffic.prefix_tokens if prefix is not None else 0.0
        found.append(SimulatedRequest(len(found), at, shared + own, output, prefix))
    return found


def _steady(rate: float, rng: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def _in_bursts(traffic: TrafficModel, rng: random.Random) -> Iterator[float]:
    """Yield arrivals of a Markov-modulated Poisson process: calm and busy periods with the given mean rate."""
    calm = traffic.rate * (1 - BUSY_SHARE * traffic.burst) / (1 - BUSY_SHARE)
    stays = {True: BUSY_SECONDS, False: BUSY_SECONDS * (1 - BUSY_SHARE) / BUSY_SHARE}
    busy, at = rng.random() < BUSY_SHARE, 0.0
    while True:
        end, rate = at + rng.expovariate(1 / stays[busy]), traffic.rate * traffic.burst if busy else calm
        while rate > 0 and (at := at + rng.expovariate(rate)) < end:
            yield at
        busy, at = not busy, end  # exponential times have no memory, so the next arrival is sampled again


def _length(kind: Lengths, mean: float, rng: random.Random) -> float:
    if kind == "fixed" or mean <= 0:
        return max(0.0, mean)
    if kind == "exponential":
        return rng.expovariate(1 / mean)
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
