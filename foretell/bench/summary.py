"""One row over all cells of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from statistics import fmean
from typing import Any, Protocol

from .intervals import Estimate, interval, mean_of

ESTIMATE = "estimate"  # a field for the mean over cells, not part of the JSON


class Part(Protocol):
    """What a mean is made of: a cell. `estimate` is that of its log ratio, where it was measured more than once."""

    @property
    def accepted_per_step(self) -> float | None: ...

    @property
    def speedup(self) -> float | None: ...

    @property
    def same_text(self) -> bool | None: ...

    @property
    def estimate(self) -> Estimate | None: ...


@dataclass(frozen=True)
class Overall:
    """One arm over all its cells, of which each counts the same."""

    arm: str
    cells: int
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None


def over_all(arm: str, cells: Sequence[Part]) -> Overall:
    """The mean of cells; its interval is known where that of each ratio is."""
    timed = [cell for cell in cells if cell.speedup is not None]
    steps = [cell.accepted_per_step for cell in cells if cell.accepted_per_step is not None]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return Overall(
        arm=arm,
        cells=len(cells),
        accepted_per_step=fmean(steps) if steps else None,
        speedup=math.exp(fmean(math.log(cell.speedup) for cell in timed if cell.speedup)) if timed else None,
        speedup_interval=interval(mean_of([cell.estimate for cell in timed])),
        same_text=all(same) if same else None,
    )


def as_row(cell: Any) -> dict[str, Any]:
    """A cell as it goes into the JSON."""
    assert is_dataclass(cell) and not isinstance(cell, type)
    return {name: value for name, value in asdict(cell).items() if name != ESTIMATE}
