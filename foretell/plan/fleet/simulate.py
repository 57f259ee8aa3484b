"""Lets calls come to a fleet, event by event, and says how it went."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from foretell.plan.fleet.arrivals import Call
from foretell.plan.fleet.replica import Replica, Tally, Visit
from foretell.plan.fleet.service_time import Pace

Route = Callable[[Call, Sequence[Replica]], Replica]
ROUTES = ("random", "least-loaded", "prefix")
CROWDED = 1.25  # a copy with so many times the mean load is passed over for its prefixes, too
SLACK = 2  # texts that are no crowd


def route_of(name: str, seed: int) -> Route:
    """The way of that name."""
    if name == "random":
        rng = random.Random(f"{seed} routes")
        return lambda call, replicas: rng.choice(replicas)
    return by_prefix if name == "prefix" else least_loaded


def least_loaded(call: Call, replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.load, replica.number))


def by_prefix(call: Call, replicas: Sequence[Replica]) -> Replica:
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
class Fleet:
    """So many copies, and what each can keep of prompts' beginnings."""

    replicas: int
    pace: Pace
    known_prefixes: int = 0
    prefix_tokens: float = 0.0


@dataclass(frozen=True)
class Run:
    """Everything that happened, up to when the last one was served."""

    visits: tuple[Visit, ...]
    tallies: tuple[Tally, ...]
    seconds: float  # in which calls came
    end: float
    usual: Tally  # of all copies, from when it had warmed up until the last call came

    @property
    def counted(self) -> list[Visit]:
        """Those that came when it had warmed up."""
        return [visit for visit in self.visits if visit.call.at >= WARM_UP * self.seconds]

    @property
    def first_tokens(self) -> list[float]:
        return sorted(visit.first_token for visit in self.counted)

    @property
    def per_tokens(self) -> list[float]:
        return sorted(each for visit in self.counted if (each := visit.per_token) is not None)

    @property
    def tokens_per_second(self) -> float:
        """Written by all copies, while calls come: what it takes to finish the longest text says nothing of a rate."""
        span = (WARM_UP * self.seconds, self.seconds)
        firsts = sum(span[0] < visit.first <= span[1] for visit in self.visits)
        return (self.usual.written + firsts) / self._time

    @property
    def utilisation(self) -> float:
        """The share of time in which a copy has work."""
        return self.usual.busy / (len(self.tallies) * self._time)

    @property
    def texts_served(self) -> float:
        """On one copy at once, without those that wait."""
        return self.usual.seated / (len(self.tallies) * self._time)

    @property
    def texts_at_once(self) -> float:
        """On one copy, waiting ones included."""
        return self.usual.texts / (len(self.tallies) * self._time)

    @property
    def _time(self) -> float:
        return (1 - WARM_UP) * self.seconds

    @property
    def keeps_up(self) -> bool:
        """Whether the crowd at the end is not much larger than at half time."""
        half = self.seconds / 2
        late = sum(visit.call.at >= half for visit in self.visits)
        return self.crowd(self.seconds) - self.crowd(half) <= max(1.0, STEADY * late)

    def crowd(self, at: float) -> int:
        """Calls in the fleet at a moment."""
        return sum(visit.call.at <= at < visit.done for visit in self.visits)

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that no copy had to read."""
        asked = sum(visit.call.prompt for visit in self.visits)
        return 1 - sum(visit.to_read for visit in self.visits) / asked if asked else 0.0


class _Fleet:
    """Copies in the midst of it, and what is to happen next."""

    def __init__(self, fleet: Fleet, route: Route) -> None:
        self.replicas = [
            Replica(number, fleet.pace, fleet.known_prefixes, fleet.prefix_tokens) for number in range(fleet.replicas)
        ]
        self.route, self.visits = route, list[Visit]()
        self._events: list[tuple[float, int, int]] = []  # when, the copy, and the version of its plans

    def come(self, calls: Iterable[Call]) -> None:
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
                replica.settle()
                self._look_ahead(replica)

    def tallied(self, at: float) -> Tally:
        """Of all copies, up to a moment."""
        self.let_pass(at)
        for replica in self.replicas:
            replica.advance(at)
        return Tally.of_all([replica.tally for replica in self.replicas])

    def _look_ahead(self, replica: Replica) -> None:
        when = replica.next_event()
        if when is not None:
            heapq.heappush(self._events, (when, replica.number, replica.version))


def simulate(fleet: Fleet, calls: Sequence[Call], route: Route, seconds: float) -> Run:
    """Send every call to a copy and run until all are served."""
    running, warm = _Fleet(fleet, route), WARM_UP * seconds
    running.come(call for call in calls if call.at < warm)
    before = running.tallied(warm)
    running.come(call for call in calls if call.at >= warm)
    usual = running.tallied(seconds).since(before)
    running.let_pass(float("inf"))
    end = max([seconds, *(visit.done for visit in running.visits)])
    running.tallied(end)
    return Run(tuple(running.visits), tuple(replica.tally for replica in running.replicas), seconds, end, usual)


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """The value that so large a share does not exceed."""
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None
