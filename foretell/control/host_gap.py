"""Host time that drafts add to a step, and whether an async step without drafts is worth more than drafts."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median_low

from foretell.types import StepTimes

from .settings import ControllerTuning


class HostGap:
    """Seconds that the device idles between two steps while the host schedules, by batch size.

    Async scheduling removes the gap, but an async step is sent before its input tokens are known and can have no draft.
    So this class also tracks what drafts save, and decides which is worth more.
    """

    def __init__(self, tuning: ControllerTuning = ControllerTuning()) -> None:
        self.tuning = tuning
        # By whether the device makes the drafts itself, which leaves the host time to prepare the verification; and by
        # the bit length of the batch size, since the host works on each sequence.
        self._samples = {drafting: defaultdict[int, deque[float]](self._no_samples) for drafting in (False, True)}
        self._host_seconds: dict[bool, float] = {}  # by whether a step drafts: host time that no other part has
        self._observed_at: tuple[float, int] = (0.0, 0)  # end of the last decode step, and its sequences
        self._savings = 0.0  # moving average of the seconds that drafts save per step
        self._async_steps = 0  # since the last synchronous one

    def _no_samples(self) -> deque[float]:
        return deque(maxlen=self.tuning.gap_samples)

    def observe(self, batch_size: int, seconds: float, device_drafts: bool = False) -> None:
        """Add the seconds between two steps of this batch size, in which the device waited for the host."""
        self._samples[device_drafts][batch_size.bit_length()].append(seconds)

    def observe_step(self, count: int, has_drafts: bool, now: float, times: StepTimes | None) -> None:
        """Learn the host time between two steps, drafts, decisions and target aside; with drafts there is more to do.

        `times` is None unless all sequences were decoding. With async scheduling it overlaps with the device, and the
        host gap is measured instead.
        """
        (before, sequences), self._observed_at = self._observed_at, (now, count)
        if times is None or times.host_gap is not None:
            self._observed_at = (0.0, 0)
        elif sequences == count and not times.is_outlier:
            host = now - before - times.target_seconds - times.draft_seconds
            known = self._host_seconds.get(has_drafts, host)
            if 0 < host < times.target_seconds:  # else the engine was idle in between
                self._host_seconds[has_drafts] = known + 0.05 * (min(host, 3 * known) - known)

    @property
    def host_seconds(self) -> float:
        """Return the host time that drafts add to a step, without async scheduling; 0 until both were measured."""
        drafting, plain = (self._host_seconds.get(has_drafts) for has_drafts in (True, False))
        return 0.0 if drafting is None or plain is None else max(0.0, drafting - plain)

    def observe_savings(self, seconds: float) -> None:
        """Add the time that the drafts of one step are expected to save."""
        self._savings += 0.25 * (seconds - self._savings)

    def outweighs_drafts(self, batch_size: int) -> bool:
        """Return whether the next step should run asynchronously. Call it once per step.

        Some steps run synchronously to measure the gap again: more of them until three samples exist.
        """
        if self._savings >= self.seconds(batch_size):
            return False
        known = len(self._samples[False].get(batch_size.bit_length(), ())) >= 3
        interval = self.tuning.gap_interval if known else self.tuning.gap_interval // 16
        self._async_steps = (self._async_steps + 1) % interval
        return self._async_steps > 0

    def seconds(self, batch_size: int) -> float:
        """Return the median gap at this batch size or the nearest measured one; 0 before any measurement."""
        size, known = batch_size.bit_length(), self._samples[False] or self._samples[True]
        return median_low(known[min(known, key=lambda other: abs(other - size))]) if known else 0.0

    def hidden_seconds(self, batch_size: int) -> float:
        """Return the part of the gap that drafts made on the device hide; 0 until both cases were measured."""
        plain, drafting = (self._samples[device].get(batch_size.bit_length()) for device in (False, True))
        return median_low(plain) - median_low(drafting) if plain and drafting else 0.0
