"""Charts of how long readers wait."""

from __future__ import annotations

from collections.abc import Sequence

from ..latency import Latency
from .charts import Row, RowChart, Shape
from .scales import Scale, duration, time_scale

STRIP = "The bar holds the middle half, the line nine tenths, the mark is the median."


def waits_chart(title: str, about: str, waits: Sequence[tuple[str, str, Latency]]) -> RowChart:
    """Distributions over one scale: names, colours and times."""
    scale, ticks = time_scale([value for _, _, wait in waits for value in _five(wait)])
    rows = [
        Row(name, _strip(wait, scale, css), duration(wait.p50), f"p99 {duration(wait.p99)}", f"{wait.count} in all")
        for name, css, wait in waits
    ]
    return RowChart(title, f"{about} {STRIP}", rows, ticks)


def _five(wait: Latency) -> list[float]:
    """The 5th, 25th, 50th, 75th and 95th of a hundred."""
    last = len(wait.curve) - 1
    return [wait.curve[round(share * last)] for share in (0.05, 0.25, 0.5, 0.75, 0.95)]


def _strip(wait: Latency, scale: Scale, css: str) -> list[Shape]:
    low, lower, middle, upper, high = (scale.at(value) for value in _five(wait))
    box = Shape("box", lower, max(upper, lower + 0.4), css)
    return [Shape("line", low, high, css), box, Shape("tick", middle, middle, css)]
