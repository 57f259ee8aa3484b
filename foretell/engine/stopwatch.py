"""What steps take, and what a device waits for between them."""

from __future__ import annotations

from time import perf_counter

from foretell.types import StepTimes

from .flight import Flight

LATE = 0.9  # of a step's time: if the host was elsewhere for so much of it, the device was done before it came back


class Stopwatch:
    """Where nothing is sent ahead, all that the host does belongs to the step it does it for. Where steps are, it runs
    beside the device, and what counts is when a step had its tokens and how long the device had nothing to do."""

    def __init__(self) -> None:
        self._landed: float | None = None  # when the last step had its tokens
        self._texts = 0  # in that step, if each of them ran one token
        self._left: float | None = None  # when the engine had done with the last step
        self.away = 0.0  # seconds since that landed in which nobody asked: what callers do is not its own

    def enter(self) -> None:
        """A step is asked for."""
        if self._left is not None:
            self.away += perf_counter() - self._left
            self._left = None

    def leave(self) -> None:
        """What came of it is given back."""
        self._left = perf_counter()

    def apart(self, flight: Flight, curious: float) -> StepTimes:
        """Of a step that is over and written down; `curious` are seconds of what only drafters want to know of it."""
        running = perf_counter() - flight.drafted - curious
        return StepTimes(flight.drafted - flight.began + curious, running, flight.proposing, flight.odd)

    def beside(self, flight: Flight, curious: float) -> StepTimes:
        """Of one that has arrived, on a device that steps are sent to ahead. What the host does with its tokens is no
        part of it, and what the next one waits for, unless that was sent ahead: a step would else seem longer for
        nothing but that the host had looked on."""
        before, texts, landed = self._landed, self._texts, flight.arrived
        elsewhere = self.away - flight.away  # what the host did for others while this ran
        self._landed, self.away = landed, 0.0
        self._texts = len(flight.plan) if all(share.take == 1 for share in flight.plan) else 0
        since = flight.launched if before is None else max(before, flight.launched)
        drafting = 0.0 if flight.is_ahead else flight.drafted - flight.began
        waiting = None
        if before is not None and not flight.is_ahead and 0 < self._texts == texts:
            waiting = max(0.0, since - before - flight.away - flight.proposing)
        odd = flight.odd or elsewhere > LATE * (landed - since)
        return StepTimes(drafting + curious, landed - since, flight.proposing, odd, waiting)

    def rest(self) -> None:
        """Nobody writes any more: until somebody does, no device waits for anything."""
        self._landed = self._left = None
        self.away = 0.0
