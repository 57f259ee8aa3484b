"""One copy of a model: who waits, whose prompt is read, who is written for. Between two events all rates stay."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from .arrivals import Call
from .service_time import Pace

CLOSE = 1e-6  # of a token: what rounding a moment may leave undone


@dataclass
class Visit:
    """What became of a call."""

    call: Call
    replica: int
    to_read: float  # tokens of the prompt that no cache had
    begun: float = 0.0
    first: float = 0.0  # when its first token came
    done: float = 0.0

    @property
    def first_token(self) -> float:
        return self.first - self.call.at

    @property
    def per_token(self) -> float | None:
        """Seconds for each token behind the first."""
        later = self.call.output - 1
        return (self.done - self.first) / later if later > 0 else None


@dataclass
class Tally:
    """Integrals over time, for the laws that must hold whatever happens."""

    busy: float = 0.0  # seconds in which there was work
    texts: float = 0.0  # texts here, waiting ones included, times seconds
    seated: float = 0.0  # the same without those that wait
    written: float = 0.0  # tokens behind the first of each text
    read: float = 0.0  # tokens

    @classmethod
    def of_all(cls, tallies: Sequence[Tally]) -> Tally:
        return cls(*(sum(values) for values in zip(*map(astuple, tallies), strict=True)))

    def since(self, before: Tally) -> Tally:
        return Tally(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass
class Replica:
    """A copy; `known` prompts' beginnings stay in its cache, the last used ones."""

    number: int
    pace: Pace
    known: int = 0
    prefix_tokens: float = 0.0
    tally: Tally = field(default_factory=Tally)
    now: float = 0.0
    version: int = 0  # of what is to come next here; an event made for an older one is void
    _waiting: deque[Visit] = field(default_factory=deque)
    _reading: deque[Visit] = field(default_factory=deque)
    _left: float = 0.0  # tokens of the first prompt being read
    _writing: list[tuple[float, int, Visit]] = field(default_factory=list)
    _written: float = 0.0  # tokens that a text would have which was here from the start
    _prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        """Texts that are here, in whatever state."""
        return len(self._waiting) + len(self._reading) + len(self._writing)

    def add(self, call: Call, now: float) -> Visit:
        """Somebody comes."""
        self.advance(now)
        visit = Visit(call, self.number, call.prompt)
        self._waiting.append(visit)
        self._admit()
        return visit

    def next_event(self) -> float | None:
        """When something changes here if nobody comes."""
        texts, reading = len(self._writing), bool(self._reading)
        times = []
        if reading:
            times.append(self._left / self.pace.reading(texts))
        if texts:
            times.append(max(0.0, self._writing[0][0] - self._written) / self.pace.writing(texts, reading))
        return self.now + min(times) if times else None

    def advance(self, now: float) -> None:
        """Let time pass up to `now`, before which nothing changes."""
        seconds, texts, reading = now - self.now, len(self._writing), bool(self._reading)
        self.now = now
        self.tally.texts += seconds * self.load
        self.tally.seated += seconds * (self.load - len(self._waiting))
        if not self.load:
            return
        self.tally.busy += seconds
        grown = seconds * self.pace.writing(texts, reading)
        self._written += grown
        self.tally.written += grown * texts
        if reading and seconds:
            taken = min(self._left, seconds * self.pace.reading(texts))
            self._left -= taken
            self.tally.read += taken

    def settle(self) -> None:
        """What was to happen now happens: prompts are done, texts are done, seats are taken."""
        while self._writing and self._writing[0][0] <= self._written * (1 + CLOSE) + CLOSE:
            _, _, visit = heapq.heappop(self._writing)
            visit.done = self.now
        if self._reading and self._left <= CLOSE:
            self._start_writing(self._reading.popleft())
            self._next_prompt()
        self._admit()

    def _admit(self) -> None:
        self.version += 1
        while self._waiting and len(self._reading) + len(self._writing) < self.pace.seats:
            visit = self._waiting.popleft()
            visit.begun = self.now
            visit.to_read = max(0.0, visit.call.prompt - self._cached(visit.call))
            self._reading.append(visit)
            if len(self._reading) == 1:
                self._next_prompt()

    def _next_prompt(self) -> None:
        """The next prompt comes up; one with nothing to read is written for at once."""
        while self._reading:
            self._left = self._reading[0].to_read if self.pace.read else 0.0
            if self._left > 0:
                return
            self._start_writing(self._reading.popleft())

    def _start_writing(self, visit: Visit) -> None:
        visit.first = self.now
        later = visit.call.output - 1
        if later <= 0:
            visit.done = self.now
            return
        heapq.heappush(self._writing, (self._written + later, visit.call.number, visit))

    def _cached(self, call: Call) -> float:
        """Tokens of a prompt that the cache has; its beginning is there from now on."""
        if call.prefix is None or not self.known:
            return 0.0
        hit = call.prefix in self._prefixes
        self._prefixes[call.prefix] = None
        self._prefixes.move_to_end(call.prefix)
        if len(self._prefixes) > self.known:
            self._prefixes.popitem(last=False)
        return self.prefix_tokens if hit else 0.0
