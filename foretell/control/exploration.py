"""Exploration: probes of drafters that are not in use, and plain steps to compare speculation with."""

from __future__ import annotations

from .settings import ExplorationTuning


class DrafterExploration:
    """Schedules probes of unused drafters with exponential backoff and a bound on their share of step time."""

    def __init__(self, tuning: ExplorationTuning = ExplorationTuning()) -> None:
        self.tuning = tuning
        self._last: dict[str, int] = {}  # by drafter: step of its last use or probe
        self._backoff: dict[str, int] = {}  # by drafter: steps to wait since then

    def is_idle(self, drafter: str, used: bool, step: int) -> bool:
        """Return whether a drafter was unused for long enough for a probe, its cost aside."""
        if used or drafter not in self._last:
            self._last[drafter] = step
        return step - self._last[drafter] >= max(self.tuning.probe_interval, self._backoff.get(drafter, 0))

    def is_due(self, drafter: str, step: int, probe_seconds: float, plain_seconds: float) -> bool:
        """Return whether an idle drafter may be probed, given the cost of the probe and of a plain step."""
        return step - self._last[drafter] >= self._interval(drafter, probe_seconds, plain_seconds)

    def begin(self, drafter: str, step: int, probe_seconds: float, plain_seconds: float) -> None:
        """Record a probe in this step and double the interval to the next one."""
        interval = self._interval(drafter, probe_seconds, plain_seconds)
        self._backoff[drafter] = min(2 * interval, self.tuning.probe_max_interval)
        self._last[drafter] = step

    def _interval(self, drafter: str, probe_seconds: float, plain_seconds: float) -> int:
        affordable = int(probe_seconds / (self.tuning.probe_time_share * plain_seconds))
        return max(self.tuning.probe_interval, affordable, self._backoff.get(drafter, 0))

    def reset_backoff(self, drafter: str) -> None:
        """Start the backoff again, because a draft token of the drafter was accepted."""
        self._backoff.pop(drafter, None)


class BaselineSteps:
    """Schedules plain steps while speculation is on, with exponential backoff.

    Without them the cost of a plain step would never be measured again.
    """

    def __init__(self, tuning: ExplorationTuning = ExplorationTuning()) -> None:
        self.tuning = tuning
        self._since = 0  # speculative steps since the last plain one
        self._interval = tuning.baseline_interval

    def is_due(self, observed_steps: int, speedup: float) -> bool:
        """Return whether this step should be plain.

        `observed_steps` is the number of steps in the latency model. The larger the expected `speedup`, the less likely
        a plain step changes the decision, and the longer the interval.
        """
        tuning, interval = self.tuning, self._interval
        if observed_steps >= tuning.baseline_known_steps:
            interval = max(interval, tuning.baseline_interval_known)
        if self._since < interval * speedup:
            return False
        self._interval = min(2 * interval, tuning.baseline_max_interval)
        return True

    def record_step(self, speculative: bool) -> None:
        """Count a step."""
        self._since = self._since + 1 if speculative else 0
