"""Curves in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 60, 14
MARKS = "ox+#@%"  # one a curve; the best is drawn last and over the others
BEST = "*"


def text_plot(title: str, curves: Mapping[str, Curve], best: str, logarithmic: bool = False) -> str:
    """Points of several curves over one pair of axes; the curve named `best` is marked with a star."""
    marks = {name: BEST if name == best else MARKS[i % len(MARKS)] for i, name in enumerate(curves)}
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(1.0, max(y for _, y in points))
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    even = _line(1.0, top)
    cells[even] = ["·"] * WIDTH
    for name, curve in sorted(curves.items(), key=lambda pair: pair[0] == best):
        for x, y in curve:
            cells[_line(y, top)][_column(x, left, right, logarithmic)] = marks[name]
    lines = [f"{_label(line, top, even):>6} |{''.join(row).rstrip()}" for line, row in enumerate(cells)]
    foot = f"{'':>6} +{'-' * WIDTH}"
    ends = f"{'':>8}{left:g}{f'{right:g}':>{WIDTH - len(f'{left:g}')}}"
    legend = "  ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([title, *lines, foot, ends, f"{'':>8}{legend}"])


def _line(value: float, top: float) -> int:
    return min(HEIGHT - 1, max(0, round((HEIGHT - 1) * (1 - value / top))))


def _label(line: int, top: float, even: int) -> str:
    if line == even:
        return "1.00"
    return f"{top:.2f}" if line == 0 else "0" if line == HEIGHT - 1 else ""


def _column(x: float, left: float, right: float, logarithmic: bool) -> int:
    if right == left:
        return 0
    share = math.log(x / left) / math.log(right / left) if logarithmic else (x - left) / (right - left)
    return round((WIDTH - 1) * share)
