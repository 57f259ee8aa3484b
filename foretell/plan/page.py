"""A plan as SVG charts, or as a self-contained HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from foretell.plan.planner import PlanResult, remarks
from foretell.plan.table import (
    BEST,
    Curve,
    batch_curves,
    rate_curves,
    tables,
    title,
)

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 44, 88, 38, 44
LABEL = 14  # least distance of two labels in pixels
STYLE = """
:root { --ink: #1f2933; --faint: #d5dbe1; --soft: #6b7785; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --faint: #39424d; --soft: #98a4b0; --paper: #14181d; } }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg .title { font-weight: 600; font-size: 13px; }
svg .grid { stroke: var(--faint); stroke-width: 1; }
svg .even { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 4 3; }
svg .curve { fill: none; stroke-width: 2; }
svg .paper { fill: var(--paper); }
""".strip()
COLOURS = ("#4477aa", "#ccbb44", "#228833", "#aa3377", "#66ccee", "#bbbbbb")  # distinguishable with colour blindness
BEST_COLOUR = "#ee6677"


@dataclass(frozen=True)
class Axes:
    """Maps values to pixels. The vertical axis starts at 0."""

    left: float
    right: float
    top: float
    logarithmic: bool = False

    def x(self, value: float) -> float:
        if self.right == self.left:
            return LEFT
        far = (
            math.log(value / self.left) / math.log(self.right / self.left)
            if self.logarithmic
            else (value - self.left) / (self.right - self.left)
        )
        return LEFT + far * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def chart(
    title: str, across: str, curves: Mapping[str, Curve], best: str = "", logarithmic: bool = False, shift: float = 0
) -> str:
    """Return one chart, `shift` pixels down, with the name of each curve at its end."""
    points = [point for curve in curves.values() for point in curve]
    top = max(1.2, 1.08 * max(y for _, y in points))
    axes = Axes(min(x for x, _ in points), max(x for x, _ in points), top, logarithmic)
    marks = sorted({x for x, _ in points})
    parts = [
        f'<g transform="translate(0 {shift:g})">',
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
        *_grid(axes, marks, across),
        *_lines(axes, curves, best),
        "</g>",
    ]
    return "\n".join(parts)


def _grid(axes: Axes, marks: list[float], across: str) -> list[str]:
    end = WIDTH - RIGHT
    parts = []
    step = 0.5 if axes.top <= 4 else 1.0
    for i in range(int(axes.top / step) + 1):
        y, kind = axes.y(i * step), "even" if i * step == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{i * step:g}x</text>')
    for value in _spread(marks):
        x = axes.x(value)
        parts.append(f'<text class="soft" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + end) / 2
    parts.append(f'<text class="soft" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    return parts


def _spread(marks: list[float], most: int = 8) -> list[float]:
    """Return at most `most` of the tick values, the first and last included."""
    every = math.ceil(max(1, len(marks) - 1) / (most - 1))
    return marks[::every] if (len(marks) - 1) % every == 0 else [*marks[:-1:every], marks[-1]]


def _lines(axes: Axes, curves: Mapping[str, Curve], best: str) -> list[str]:
    parts, colours = [], iter(COLOURS * (len(curves) // len(COLOURS) + 1))
    coloured = {name: BEST_COLOUR if name == best else next(colours) for name in curves}
    for name, curve in sorted(curves.items(), key=lambda pair: pair[0] == best):
        points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in curve)
        parts.append(f'<polyline class="curve" stroke="{coloured[name]}" points="{points}"/>')
    ends = sorted((axes.y(curve[-1][1]), name) for name, curve in curves.items())
    last = -math.inf
    for y, name in ends:
        last = max(y, last + LABEL)  # move labels down that would overlap
        x = WIDTH - RIGHT + 8
        parts.append(f'<text x="{x}" y="{last + 4:.1f}" style="fill:{coloured[name]}">{escape(name)}</text>')
    return parts


def drawing(panels: list[str]) -> str:
    """Return an SVG file of charts, which were made with shifts of `HEIGHT`."""
    height = HEIGHT * len(panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            *panels,
            "</svg>",
            "",
        ]
    )


LOOK = """
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
.charts svg { width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
pre { overflow-x: auto; font-size: .8rem; }
""".strip()


def panels(found: PlanResult, apart: bool) -> list[str]:
    """Return the charts of the speedup by batch and by acceptance; `apart` for separate drawings."""
    context = found.query.contexts[0]
    return [
        chart(
            f"Speedup over plain decoding, {context} tokens",
            "batch size",
            batch_curves(found),
            BEST,
            logarithmic=True,
        ),
        chart(
            "Speedup of the best length",
            "acceptance rate",
            rate_curves(found),
            shift=0 if apart else HEIGHT,
        ),
    ]


def svg(found: PlanResult) -> str:
    return drawing(panels(found, apart=False))


def html(found: PlanResult) -> str:
    """Return the page: charts, tables, and all figures as JSON in a fold."""
    charts = "\n".join(f'<div class="wide">{drawing([panel])}</div>' for panel in panels(found, apart=True))
    notes = "\n".join(f"<p>{escape(line)}</p>" for line in remarks(found))
    figures = escape(json.dumps(found.as_json(), indent=2))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan: {escape(found.query.target.shape.name)}</title>
<style>{LOOK}</style>
</head>
<body>
<main>
<h1>Plan for {escape(found.query.target.shape.name)}</h1>
<p>{escape(title(found))}</p>
<div class="charts">
{charts}
</div>
{_tables(found)}
{notes}
<details><summary>All figures and assumptions, as JSON</summary><pre>{figures}</pre></details>
</main>
</body>
</html>
"""


def _tables(found: PlanResult) -> str:
    blocks = [
        f'<h2>{escape(table.title)}</h2>\n<div class="wide">{_table(table.head, table.rows)}</div>'
        for table in tables(found)
    ]
    return "\n".join(blocks)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>\n{lines}\n</tbody></table>"
