"""Lets calls come to a fleet, event by event, and says how it went."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from foretell.plan.fleet.arrivals import SimulatedRequest
from foretell.plan.fleet.replica import LoadIntegrals, ServedRequest, SimulatedReplica
from foretell.plan.fleet.service_time import ServiceTimes

Route = Callable[[SimulatedRequest, Sequence[SimulatedReplica]], SimulatedReplica]
ROUTES = ("random", "least-loaded", "prefix")
CROWDED = 1.25  # a copy with so many times the mean load is passed over for its prefixes, too
SLACK = 2  # texts that are no crowd


def route_of(name: str, seed: int) -> Route:
    """The way of that name."""
    if name == "random":
        rng = random.Random(f"{seed} routes")
        return lambda call, replicas: rng.choice(replicas)
    return by_prefix if name == "prefix" else least_loaded


def least_loaded(call: SimulatedRequest, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
    return min(replicas, key=lambda replica: (replica.load, replica.number))


def by_prefix(call: SimulatedRequest, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
    """Where its beginning is likely cached, unless everybody else thought so too."""
    if call.prefix is None:
        return least_loaded(call, replicas)
    digest = blake2b(str(call.prefix).encode(), digest_size=8).digest()
    home = replicas[int.from_bytes(digest, "big") % len(replicas)]
    mean = sum(replica.load for replica in replicas) / len(replicas)
    return home if home.load <= CROWDED * mean + SLACK else least_loaded(call, replicas)


WARM_UP = 0.1  # of the time, whose calls are not counted
STEADY = 0.05  # of the calls of the second half, by which the crowd may have grown meanwhile


@dataclass(frozen=True)
class FleetSpec:
    """So many copies, and what each can keep of prompts' beginnings."""

    replicas: int
    service: ServiceTimes
    max_prefixes: int = 0
    prefix_tokens: float = 0.0


@dataclass(frozen=True)
class FleetRun:
    """Everything that happened, up to when the last one was served."""

    requests: tuple[ServedRequest, ...]
    integrals: tuple[LoadIntegrals, ...]
    seconds: float  # in which calls came
    end: float
    steady: LoadIntegrals  # of all copies, from when it had warmed up until the last call came

    @property
    def counted(self) -> list[ServedRequest]:
        """Those that came when it had warmed up."""
        return [visit for visit in self.requests if visit.request.at >= WARM_UP * self.seconds]

    @property
    def ttfts(self) -> list[float]:
        return sorted(visit.ttft for visit in self.counted)

    @property
    def tpots(self) -> list[float]:
        return sorted(each for visit in self.counted if (each := visit.tpot) is not None)

    @property
    def tokens_per_second(self) -> float:
        """Written by all copies, while calls come: what it takes to finish the longest text says nothing of a rate."""
        span = (WARM_UP * self.seconds, self.seconds)
        firsts = sum(span[0] < visit.first_token_at <= span[1] for visit in self.requests)
        return (self.steady.output_tokens + firsts) / self._time

    @property
    def utilisation(self) -> float:
        """The share of time in which a copy has work."""
        return self.steady.busy_seconds / (len(self.integrals) * self._time)

    @property
    def running_per_replica(self) -> float:
        """On one copy at once, without those that wait."""
        return self.steady.running_seconds / (len(self.integrals) * self._time)

    @property
    def sequences_per_replica(self) -> float:
        """On one copy, waiting ones included."""
        return self.steady.sequence_seconds / (len(self.integrals) * self._time)

    @property
    def _time(self) -> float:
        return (1 - WARM_UP) * self.seconds

    @property
    def keeps_up(self) -> bool:
        """Whether the crowd at the end is not much larger than at half time."""
        half = self.seconds / 2
        late = sum(visit.request.at >= half for visit in self.requests)
        return self.in_system(self.seconds) - self.in_system(half) <= max(1.0, STEADY * late)

    def in_system(self, at: float) -> int:
        """Calls in the fleet at a moment."""
        return sum(visit.request.at <= at < visit.finished_at for visit in self.requests)

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that no copy had to read."""
        asked = sum(visit.request.prompt for visit in self.requests)
        return 1 - sum(visit.prefill_tokens for visit in self.requests) / asked if asked else 0.0


class _Fleet:
    """Copies in the midst of it, and what is to happen next."""

    def __init__(self, fleet: FleetSpec, route: Route) -> None:
        self.replicas = [
            SimulatedReplica(number, fleet.service, fleet.max_prefixes, fleet.prefix_tokens)
            for number in range(fleet.replicas)
        ]
        self.route, self.visits = route, list[ServedRequest]()
        self._events: list[tuple[float, int, int]] = []  # when, the copy, and the version of its plans

    def come(self, calls: Iterable[SimulatedRequest]) -> None:
        for call in calls:
            self.let_pass(call.at)
            replica = self.route(call, self.replicas)
            self.visits.append(replica.add(call, call.at))
            self._look_ahead(replica)

    def let_pass(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            when, number, version = heapq.heappop(self._events)
            replica = self.replicas[number]
            if version == replica.version:
                replica.advance(when)
                replica.complete_due()
                self._look_ahead(replica)

    def tallied(self, at: float) -> LoadIntegrals:
        """Of all copies, up to a moment."""
        self.let_pass(at)
        for replica in self.replicas:
            replica.advance(at)
        return LoadIntegrals.of_all([replica.integrals for replica in self.replicas])

    def _look_ahead(self, replica: SimulatedReplica) -> None:
        when = replica.next_event()
        if when is not None:
            heapq.heappush(self._events, (when, replica.number, replica.version))


def simulate(fleet: FleetSpec, calls: Sequence[SimulatedRequest], route: Route, seconds: float) -> FleetRun:
    """Send every call to a copy and run until all are served."""
    running, warm = _Fleet(fleet, route), WARM_UP * seconds
    running.come(call for call in calls if call.at < warm)
    before = running.tallied(warm)
    running.come(call for call in calls if call.at >= warm)
    usual = running.tallied(seconds).since(before)
    running.let_pass(float("inf"))
    end = max([seconds, *(visit.finished_at for visit in running.visits)])
    running.tallied(end)
    return FleetRun(
        tuple(running.visits), tuple(replica.integrals for replica in running.replicas), seconds, end, usual
    )


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """The value that so large a share does not exceed."""
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None
