"""One copy of a model: who waits, whose prompt is read, who is written for. Between two events all rates stay."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from .arrivals import SimulatedRequest
from .service_time import ServiceTimes

CLOSE = 1e-6  # of a token: what rounding a moment may leave undone


@dataclass
class ServedRequest:
    """What became of a call."""

    request: SimulatedRequest
    replica: int
    prefill_tokens: float  # tokens of the prompt that no cache had
    admitted_at: float = 0.0
    first_token_at: float = 0.0  # when its first token came
    finished_at: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.request.at

    @property
    def tpot(self) -> float | None:
        """Seconds for each token behind the first."""
        later = self.request.output - 1
        return (self.finished_at - self.first_token_at) / later if later > 0 else None


@dataclass
class LoadIntegrals:
    """Integrals over time, for the laws that must hold whatever happens."""

    busy_seconds: float = 0.0  # seconds in which there was work
    sequence_seconds: float = 0.0  # texts here, waiting ones included, times seconds
    running_seconds: float = 0.0  # the same without those that wait
    output_tokens: float = 0.0  # tokens behind the first of each text
    prefill_tokens: float = 0.0  # tokens

    @classmethod
    def of_all(cls, tallies: Sequence[LoadIntegrals]) -> LoadIntegrals:
        return cls(*(sum(values) for values in zip(*map(astuple, tallies), strict=True)))

    def since(self, before: LoadIntegrals) -> LoadIntegrals:
        return LoadIntegrals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass
class SimulatedReplica:
    """A copy; `catalog` prompts' beginnings stay in its cache, the last used ones."""

    number: int
    service: ServiceTimes
    max_prefixes: int = 0
    prefix_tokens: float = 0.0
    integrals: LoadIntegrals = field(default_factory=LoadIntegrals)
    now: float = 0.0
    version: int = 0  # of what is to come next here; an event made for an older one is void
    _waiting: deque[ServedRequest] = field(default_factory=deque)
    _reading: deque[ServedRequest] = field(default_factory=deque)
    _left: float = 0.0  # tokens of the first prompt being read
    _writing: list[tuple[float, int, ServedRequest]] = field(default_factory=list)
    _written: float = 0.0  # tokens that a text would have which was here from the start
    _prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        """Texts that are here, in whatever state."""
        return len(self._waiting) + len(self._reading) + len(self._writing)

    def add(self, call: SimulatedRequest, now: float) -> ServedRequest:
        """Somebody comes."""
        self.advance(now)
        visit = ServedRequest(call, self.number, call.prompt)
        self._waiting.append(visit)
        self._admit()
        return visit

    def next_event(self) -> float | None:
        """When something changes here if nobody comes."""
        texts, reading = len(self._writing), bool(self._reading)
        times = []
        if reading:
            times.append(self._left / self.service.prefill_rate(texts))
        if texts:
            times.append(max(0.0, self._writing[0][0] - self._written) / self.service.decode_rate(texts, reading))
        return self.now + min(times) if times else None

    def advance(self, now: float) -> None:
        """Let time pass up to `now`, before which nothing changes."""
        seconds, texts, reading = now - self.now, len(self._writing), bool(self._reading)
        self.now = now
        self.integrals.sequence_seconds += seconds * self.load
        self.integrals.running_seconds += seconds * (self.load - len(self._waiting))
        if not self.load:
            return
        self.integrals.busy_seconds += seconds
        grown = seconds * self.service.decode_rate(texts, reading)
        self._written += grown
        self.integrals.output_tokens += grown * texts
        if reading and seconds:
            taken = min(self._left, seconds * self.service.prefill_rate(texts))
            self._left -= taken
            self.integrals.prefill_tokens += taken

    def complete_due(self) -> None:
        """What was to happen now happens: prompts are done, texts are done, seats are taken."""
        while self._writing and self._writing[0][0] <= self._written * (1 + CLOSE) + CLOSE:
            _, _, visit = heapq.heappop(self._writing)
            visit.finished_at = self.now
        if self._reading and self._left <= CLOSE:
            self._start_writing(self._reading.popleft())
            self._next_prompt()
        self._admit()

    def _admit(self) -> None:
        self.version += 1
        while self._waiting and len(self._reading) + len(self._writing) < self.service.max_num_seqs:
            visit = self._waiting.popleft()
            visit.admitted_at = self.now
            visit.prefill_tokens = max(0.0, visit.request.prompt - self._cached(visit.request))
            self._reading.append(visit)
            if len(self._reading) == 1:
                self._next_prompt()

    def _next_prompt(self) -> None:
        """The next prompt comes up; one with nothing to read is written for at once."""
        while self._reading:
            self._left = self._reading[0].prefill_tokens if self.service.prefill_seconds_per_token else 0.0
            if self._left > 0:
                return
            self._start_writing(self._reading.popleft())

    def _start_writing(self, visit: ServedRequest) -> None:
        visit.first_token_at = self.now
        later = visit.request.output - 1
        if later <= 0:
            visit.finished_at = self.now
            return
        heapq.heappush(self._writing, (self._written + later, visit.request.number, visit))

    def _cached(self, call: SimulatedRequest) -> float:
        """Tokens of a prompt that the cache has; its beginning is there from now on."""
        if call.prefix is None or not self.max_prefixes:
            return 0.0
        hit = call.prefix in self._prefixes
        self._prefixes[call.prefix] = None
        self._prefixes.move_to_end(call.prefix)
        if len(self._prefixes) > self.max_prefixes:
            self._prefixes.popitem(last=False)
        return self.prefix_tokens if hit else 0.0
