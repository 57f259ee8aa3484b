"""Lets calls come to a fleet, event by event, and says how it went."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .demand import Call
from .pace import Pace
from .replica import Replica, Tally, Visit
from .routing import Route

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
        """Written by all copies."""
        return sum(visit.call.output for visit in self.visits) / self.end if self.end else 0.0

    @property
    def utilisation(self) -> float:
        """The share of time in which a copy has work."""
        return sum(tally.busy for tally in self.tallies) / (len(self.tallies) * self.end) if self.end else 0.0

    @property
    def texts_served(self) -> float:
        """On one copy at once, without those that wait."""
        return sum(tally.seated for tally in self.tallies) / (len(self.tallies) * self.end) if self.end else 0.0

    @property
    def texts_at_once(self) -> float:
        """On one copy, waiting ones included."""
        return sum(tally.texts for tally in self.tallies) / (len(self.tallies) * self.end) if self.end else 0.0

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


def simulate(fleet: Fleet, calls: Sequence[Call], route: Route, seconds: float) -> Run:
    """Send every call to a copy and run until all are served."""
    replicas = [
        Replica(number, fleet.pace, fleet.known_prefixes, fleet.prefix_tokens) for number in range(fleet.replicas)
    ]
    visits: list[Visit] = []
    events: list[tuple[float, int, int]] = []  # when, the copy, and the version of its plans

    def look_ahead(replica: Replica) -> None:
        when = replica.next_event()
        if when is not None:
            heapq.heappush(events, (when, replica.number, replica.version))

    def let_pass(until: float) -> None:
        while events and events[0][0] <= until:
            when, number, version = heapq.heappop(events)
            replica = replicas[number]
            if version == replica.version:
                replica.advance(when)
                replica.settle()
                look_ahead(replica)

    for call in calls:
        let_pass(call.at)
        replica = route(call, replicas)
        visits.append(replica.add(call, call.at))
        look_ahead(replica)
    let_pass(float("inf"))
    end = max([seconds, *(visit.done for visit in visits)])
    for replica in replicas:
        replica.advance(end)
    return Run(tuple(visits), tuple(replica.tally for replica in replicas), seconds, end)


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """The value that so large a share does not exceed."""
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None
