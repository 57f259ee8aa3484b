"""Who comes, when, and how much they want."""

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
BUSY_SHARE, BUSY_SECONDS = 0.2, 10.0  # of the time, and at a stretch, that bursts last
SPREAD = 1.0  # of the logarithm of lognormal lengths
POPULARITY = 1.0  # beginnings are asked for as Zipf has it


@dataclass(frozen=True)
class SimulatedRequest:
    """One request: when it comes, its prompt's tokens, those to be written, and the beginning it shares."""

    number: int
    at: float
    prompt: float
    output: float
    prefix: int | None = None


@dataclass(frozen=True)
class TrafficModel:
    """Requests a second and what they are like. Lengths are means; a shared beginning is part of the prompt."""

    rate: float
    prompt: float
    output: float
    arrivals: Arrivals = "poisson"
    burst: float = 3.0  # how many times the mean rate comes in a burst
    lengths: Lengths = "lognormal"
    prefixes: int = 0  # beginnings that requests share; none where 0
    prefix_tokens: float = 0.0


def generate_requests(demand: TrafficModel, seconds: float, seed: int) -> list[SimulatedRequest]:
    """Everybody who comes within so many seconds; the seed decides all of it."""
    times = random.Random(f"{seed} times")
    coming = _steady(demand.rate, times) if demand.arrivals == "poisson" else _in_bursts(demand, times)
    sizes, sharing = random.Random(f"{seed} sizes"), random.Random(f"{seed} prefixes")
    weights = list(accumulate((i + 1) ** -POPULARITY for i in range(demand.prefixes)))
    found: list[SimulatedRequest] = []
    for at in coming:
        if at >= seconds:
            return found
        own = _length(demand.lengths, demand.prompt - demand.prefix_tokens, sizes)
        output = max(1.0, _length(demand.lengths, demand.output, sizes))
        prefix = bisect(weights, sharing.random() * weights[-1]) if weights else None
        shared = demand.prefix_tokens if prefix is not None else 0.0
        found.append(SimulatedRequest(len(found), at, shared + own, output, prefix))
    return found


def _steady(rate: float, rng: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def _in_bursts(demand: TrafficModel, rng: random.Random) -> Iterator[float]:
    """Calm and busy times in turn, each exponentially long, such that the mean rate is the one asked for."""
    calm = demand.rate * (1 - BUSY_SHARE * demand.burst) / (1 - BUSY_SHARE)
    stays = {True: BUSY_SECONDS, False: BUSY_SECONDS * (1 - BUSY_SHARE) / BUSY_SHARE}
    busy, at = rng.random() < BUSY_SHARE, 0.0
    while True:
        end, rate = at + rng.expovariate(1 / stays[busy]), demand.rate * demand.burst if busy else calm
        while rate > 0 and (at := at + rng.expovariate(rate)) < end:
            yield at
        busy, at = not busy, end  # what would have come later is drawn anew, which exponential times allow


def _length(kind: Lengths, mean: float, rng: random.Random) -> float:
    if kind == "fixed" or mean <= 0:
        return max(0.0, mean)
    if kind == "exponential":
        return rng.expovariate(1 / mean)
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
