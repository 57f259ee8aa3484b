"""Metrics of benchmark cells: latency quantiles, acceptance by depth, the mean over cells, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, Protocol

from .intervals import Estimate, interval, mean_of

CURVE_POINTS = 41  # quantiles of the latency curve, evenly from minimum to maximum
JSON_NAME = "json"  # metadata key of a dataclass field: its name in the JSON, None to leave it out


def json_name(name: str | None) -> dict[str, str | None]:
    """Return the metadata of a dataclass field that has another name in the JSON; None leaves it out."""
    return {JSON_NAME: name}


@dataclass(frozen=True)
class Latency:
    """Quantiles of latencies in seconds; `curve` has evenly spaced ones from minimum to maximum."""

    count: int
    p50: float
    p90: float
    p99: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency | None:
        """Compute the quantiles; None without values."""
        ranked = sorted(seconds)
        if not ranked:
            return None
        p50, p90, p99 = (quantile(ranked, level) for level in (0.5, 0.9, 0.99))
        curve = tuple(quantile(ranked, i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS))
        return cls(len(ranked), p50, p90, p99, curve)


def quantile(ranked: Sequence[float], level: float) -> float:
    """Return the quantile of sorted values."""
    return ranked[min(len(ranked) - 1, int(level * len(ranked)))]


def token_times(step_times: Iterable[tuple[float, int]]) -> list[float]:
    """Return the seconds of each token from (seconds, tokens) of each step.

    The tokens of a step share its time equally, so that time per token and time per step are not confused.
    """
    return [seconds / count for seconds, count in step_times for _ in range(count)]


@dataclass(frozen=True)
class AcceptanceByDepth:
    """Counts of drafts by depth: those that reached it, and those accepted up to it."""

    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = field(default=(), metadata=json_name("stood"))

    @classmethod
    def counted(cls, drafts: Mapping[tuple[int, int], int]) -> AcceptanceByDepth:
        """Build from counts of drafts by (depth, accepted tokens)."""
        return cls.total(cls((count,) * depth, (count,) * accepted) for (depth, accepted), count in drafts.items())

    @classmethod
    def total(cls, several: Iterable[AcceptanceByDepth]) -> AcceptanceByDepth:
        """Add up the counts of several."""
        reached: tuple[int, ...] = ()
        accepted: tuple[int, ...] = ()
        for each in several:
            reached, accepted = _added(reached, each.reached), _added(accepted, each.accepted)
        return cls(reached, accepted)

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the acceptance rate by depth, among the drafts that reached it."""
        return tuple(accepted / reached for reached, accepted in zip_longest(self.reached, self.accepted, fillvalue=0))


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


class MeasuredCell(Protocol):
    """A cell with the metrics that a mean needs; `estimate` is that of its log ratio, if measured more than once."""

    @property
    def accepted_per_step(self) -> float | None: ...

    @property
    def speedup(self) -> float | None: ...

    @property
    def same_text(self) -> bool | None: ...

    @property
    def estimate(self) -> Estimate | None: ...


@dataclass(frozen=True)
class OverallRow:
    """The mean of one variant over all its cells, with equal weights."""

    variant: str = field(metadata=json_name("arm"))
    cells: int
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None


def mean_over_cells(variant: str, cells: Sequence[MeasuredCell]) -> OverallRow:
    """Average cells; the interval is known if that of each ratio is."""
    timed = [cell for cell in cells if cell.speedup is not None]
    steps = [cell.accepted_per_step for cell in cells if cell.accepted_per_step is not None]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return OverallRow(
        variant=variant,
        cells=len(cells),
        accepted_per_step=fmean(steps) if steps else None,
        speedup=math.exp(fmean(math.log(cell.speedup) for cell in timed if cell.speedup)) if timed else None,
        speedup_interval=interval(mean_of([cell.estimate for cell in timed])),
        same_text=all(same) if same else None,
    )


def as_row(value: Any) -> Any:
    """Convert a cell to JSON: like `asdict`, with the names that `json_name` gives."""
    if is_dataclass(value) and not isinstance(value, type):
        names = {each.name: each.metadata.get(JSON_NAME, each.name) for each in fields(value)}
        return {json: as_row(getattr(value, name)) for name, json in names.items() if json is not None}
    if isinstance(value, dict):
        return {key: as_row(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_row, value))
    return value
