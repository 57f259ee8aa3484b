"""A simulated replica: waiting, prefill and decode. All rates are constant between two events."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from .arrivals import SimulatedRequest
from .service_time import ServiceTimes

TOLERANCE = 1e-6  # tokens that floating-point rounding may leave over


@dataclass
class ServedRequest:
    """The times and the replica at which a request was served."""

    request: SimulatedRequest
    replica: int
    prefill_tokens: float  # prompt tokens that were not in the prefix cache
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.request.at

    @property
    def tpot(self) -> float | None:
        """Return the seconds per output token after the first, or None for a single token."""
        further = self.request.output - 1
        return (self.finished_at - self.first_token_at) / further if further > 0 else None


@dataclass
class LoadIntegrals:
    """Totals over time, for utilisation and for checks such as Little's law."""

    busy_seconds: float = 0.0  # time with at least one request
    sequence_seconds: float = 0.0  # requests times seconds, waiting ones included
    running_seconds: float = 0.0  # the same without waiting ones
    output_tokens: float = 0.0  # output tokens after the first of each request
    prefill_tokens: float = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[LoadIntegrals]) -> LoadIntegrals:
        return cls(*(sum(values) for values in zip(*map(astuple, parts), strict=True)))

    def since(self, before: LoadIntegrals) -> LoadIntegrals:
        return LoadIntegrals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass
class SimulatedReplica:
    """A replica with a prefix cache of `max_prefixes` prefixes, evicted least recently used first."""

    number: int
    service: ServiceTimes
    max_prefixes: int = 0
    prefix_tokens: float = 0.0
    integrals: LoadIntegrals = field(default_factory=LoadIntegrals)
    now: float = 0.0
    version: int = 0  # of the schedule; events of an older version are void
    _waiting: deque[ServedRequest] = field(default_factory=deque)
    _prefilling: deque[ServedRequest] = field(default_factory=deque)
    _prefill_left: float = 0.0  # tokens of the current prefill that remain
    _decoding: list[tuple[float, int, ServedRequest]] = field(default_factory=list)
    _decoded: float = 0.0  # output tokens of a request that decodes since time 0
    _prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        """Return the number of requests here, in any state."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def add(self, request: SimulatedRequest, now: float) -> ServedRequest:
        """Add a request that arrives now."""
        self.advance(now)
        served = ServedRequest(request, self.number, request.prompt)
        self._waiting.append(served)
        self._admit()
        return served

    def next_event(self) -> float | None:
        """Return the time of the next change without further arrivals."""
        num_decoding, is_prefilling = len(self._decoding), bool(self._prefilling)
        times = []
        if is_prefilling:
            times.append(self._prefill_left / self.service.prefill_rate(num_decoding))
        if num_decoding:
            times.append(
                max(0.0, self._decoding[0][0] - self._decoded) / self.service.decode_rate(num_decoding, is_prefilling)
            )
        return self.now + min(times) if times else None

    def advance(self, now: float) -> None:
        """Advance the time to `now`, before which nothing changes."""
        seconds, num_decoding, is_prefilling = now - self.now, len(self._decoding), bool(self._prefilling)
        self.now = now
        self.integrals.sequence_seconds += seconds * self.load
        self.integrals.running_seconds += seconds * (self.load - len(self._waiting))
        if not self.load:
            return
        self.integrals.busy_seconds += seconds
        tokens = seconds * self.service.decode_rate(num_decoding, is_prefilling)
        self._decoded += tokens
        self.integrals.output_tokens += tokens * num_decoding
        if is_prefilling and seconds:
            processed = min(self._prefill_left, seconds * self.service.prefill_rate(num_decoding))
            self._prefill_left -= processed
            self.integrals.prefill_tokens += processed

    def complete_due(self) -> None:
        """Finish decodes and the prefill that are due, and admit waiting requests."""
        while self._decoding and self._decoding[0][0] <= self._decoded * (1 + TOLERANCE) + TOLERANCE:
            _, _, served = heapq.heappop(self._decoding)
            served.finished_at = self.now
        if self._prefilling and self._prefill_left <= TOLERANCE:
            self._start_decode(self._prefilling.popleft())
            self._next_prefill()
        self._admit()

    def _admit(self) -> None:
        self.version += 1
        while self._waiting and len(self._prefilling) + len(self._decoding) < self.service.max_num_seqs:
            served = self._waiting.popleft()
            served.admitted_at = self.now
            served.prefill_tokens = max(0.0, served.request.prompt - self._cached(served.request))
            self._prefilling.append(served)
            if len(self._prefilling) == 1:
                self._next_prefill()

    def _next_prefill(self) -> None:
        """Start the next prefill; a prompt that is fully cached starts to decode at once."""
        while self._prefilling:
            self._prefill_left = self._prefilling[0].prefill_tokens if self.service.prefill_seconds_per_token else 0.0
            if self._prefill_left > 0:
                return
            self._start_decode(self._prefilling.popleft())

    def _start_decode(self, served: ServedRequest) -> None:
        served.first_token_at = self.now
        further = served.request.output - 1
        if further <= 0:
            served.finished_at = self.now
            return
        heapq.heappush(self._decoding, (self._decoded + further, served.request.number, served))

    def _cached(self, request: SimulatedRequest) -> float:
        """Return the prompt tokens in the prefix cache, and add the prefix to it."""
        if request.prefix is None or not self.max_prefixes:
            return 0.0
        hit = request.prefix in self._prefixes
        self._prefixes[request.prefix] = None
        self._prefixes.move_to_end(request.prefix)
        if len(self._prefixes) > self.max_prefixes:
            self._prefixes.popitem(last=False)
        return self.prefix_tokens if hit else 0.0
