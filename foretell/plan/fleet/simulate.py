"""Discrete-event simulation of a fleet: routing, replicas, and the statistics of a run."""

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
OVERLOAD = 1.25  # a replica above this multiple of the mean load loses its prefix affinity
SLACK = 2  # requests above that multiple that are tolerated


def route_of(name: str, seed: int) -> Route:
    """Return the routing policy of that name."""
    if name == "random":
        rng = random.Random(f"{seed} routes")
        return lambda request, replicas: rng.choice(replicas)
    return by_prefix if name == "prefix" else least_loaded


def least_loaded(request: SimulatedRequest, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
    return min(replicas, key=lambda replica: (replica.load, replica.number))


def by_prefix(request: SimulatedRequest, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
    """Route by a hash of the prefix, or to the least loaded replica if that one is overloaded."""
    if request.prefix is None:
        return least_loaded(request, replicas)
    digest = blake2b(str(request.prefix).encode(), digest_size=8).digest()
    home = replicas[int.from_bytes(digest, "big") % len(replicas)]
    mean = sum(replica.load for replica in replicas) / len(replicas)
    return home if home.load <= OVERLOAD * mean + SLACK else least_loaded(request, replicas)


WARM_UP = 0.1  # share of the time whose requests are not counted
MAX_GROWTH = 0.05  # growth of the queue over the second half, as a share of its arrivals


@dataclass(frozen=True)
class FleetSpec:
    """A number of equal replicas and the size of their prefix caches."""

    replicas: int
    service: ServiceTimes
    max_prefixes: int = 0
    prefix_tokens: float = 0.0


@dataclass(frozen=True)
class FleetRun:
    """The requests of a simulated run and their statistics."""

    requests: tuple[ServedRequest, ...]
    integrals: tuple[LoadIntegrals, ...]
    seconds: float  # during which requests arrive
    end: float  # when the last request was finished
    steady: LoadIntegrals  # of all replicas, from the end of the warm-up to the last arrival

    @property
    def counted(self) -> list[ServedRequest]:
        """Return the requests that arrived after the warm-up."""
        return [served for served in self.requests if served.request.at >= WARM_UP * self.seconds]

    @property
    def ttfts(self) -> list[float]:
        return sorted(served.ttft for served in self.counted)

    @property
    def tpots(self) -> list[float]:
        return sorted(each for served in self.counted if (each := served.tpot) is not None)

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput while requests arrive, without the time to finish the last ones."""
        span = (WARM_UP * self.seconds, self.seconds)
        firsts = sum(span[0] < served.first_token_at <= span[1] for served in self.requests)
        return (self.steady.output_tokens + firsts) / self._time

    @property
    def utilisation(self) -> float:
        """Return the share of time in which a replica has requests."""
        return self.steady.busy_seconds / (len(self.integrals) * self._time)

    @property
    def running_per_replica(self) -> float:
        """Return the mean number of running requests on a replica."""
        return self.steady.running_seconds / (len(self.integrals) * self._time)

    @property
    def sequences_per_replica(self) -> float:
        """Return the mean number of requests on a replica, waiting ones included."""
        return self.steady.sequence_seconds / (len(self.integrals) * self._time)

    @property
    def _time(self) -> float:
        return (1 - WARM_UP) * self.seconds

    @property
    def keeps_up(self) -> bool:
        """Return whether the number of requests in the fleet is stable over the second half."""
        half = self.seconds / 2
        late = sum(served.request.at >= half for served in self.requests)
        return self.in_system(self.seconds) - self.in_system(half) <= max(1.0, MAX_GROWTH * late)

    def in_system(self, at: float) -> int:
        """Return the number of requests in the fleet at a time."""
        return sum(served.request.at <= at < served.finished_at for served in self.requests)

    @property
    def cached_share(self) -> float:
        """Return the share of prompt tokens found in a prefix cache."""
        total = sum(served.request.prompt for served in self.requests)
        return 1 - sum(served.prefill_tokens for served in self.requests) / total if total else 0.0


class _FleetSimulation:
    """The state of a running simulation."""

    def __init__(self, fleet: FleetSpec, route: Route) -> None:
        self.replicas = [
            SimulatedReplica(number, fleet.service, fleet.max_prefixes, fleet.prefix_tokens)
            for number in range(fleet.replicas)
        ]
        self.route, self.served = route, list[ServedRequest]()
        self._events: list[tuple[float, int, int]] = []  # time, replica, and version of its schedule

    def add_requests(self, requests: Iterable[SimulatedRequest]) -> None:
        for request in requests:
            self.run_until(request.at)
            replica = self.route(request, self.replicas)
            self.served.append(replica.add(request, request.at))
            self._schedule(replica)

    def run_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            when, number, version = heapq.heappop(self._events)
            replica = self.replicas[number]
            if version == replica.version:
                replica.advance(when)
                replica.complete_due()
                self._schedule(replica)

    def integrals_at(self, at: float) -> LoadIntegrals:
        """Run until a time and return the totals of all replicas."""
        self.run_until(at)
        for replica in self.replicas:
            replica.advance(at)
        return LoadIntegrals.of_all([replica.integrals for replica in self.replicas])

    def _schedule(self, replica: SimulatedReplica) -> None:
        when = replica.next_event()
        if when is not None:
            heapq.heappush(self._events, (when, replica.number, replica.version))


def simulate(fleet: FleetSpec, requests: Sequence[SimulatedRequest], route: Route, seconds: float) -> FleetRun:
    """Simulate a fleet until all requests are finished."""
    running, warm = _FleetSimulation(fleet, route), WARM_UP * seconds
    running.add_requests(request for request in requests if request.at < warm)
    before = running.integrals_at(warm)
    running.add_requests(request for request in requests if request.at >= warm)
    steady = running.integrals_at(seconds).since(before)
    running.run_until(float("inf"))
    end = max([seconds, *(served.finished_at for served in running.served)])
    running.integrals_at(end)
    return FleetRun(
        tuple(running.served), tuple(replica.integrals for replica in running.replicas), seconds, end, steady
    )


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values, or None if there are none."""
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None
