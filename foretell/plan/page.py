"""A plan as a drawing, or as a page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from .chart import HEIGHT, chart, drawing
from .planner import Forecast, remarks
from .table import BEST, HEAD, SPLIT_HEAD, batch_curves, cells, rate_curves, split_cells, split_title, title

LOOK = """
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
.charts svg { min-width: 27rem; width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
pre { overflow-x: auto; font-size: .8rem; }
""".strip()


def panels(found: Forecast, apart: bool) -> list[str]:
    """The ratio by batch and by acceptance; `apart` for drawings of their own."""
    context = found.question.contexts[0]
    return [
        chart(
            f"Ratio to plain decoding, {context} tokens",
            "texts at once",
            batch_curves(found),
            BEST,
            logarithmic=True,
        ),
        chart(
            "Ratio of the best length",
            "share of guesses that stand",
            rate_curves(found),
            shift=0 if apart else HEIGHT,
        ),
    ]


def svg(found: Forecast) -> str:
    return drawing(panels(found, apart=False))


def html(found: Forecast) -> str:
    """Table, drawings, and every figure behind a click."""
    drawn = "\n".join(f'<div class="wide">{drawing([panel])}</div>' for panel in panels(found, apart=True))
    said = "\n".join(f"<p>{escape(line)}</p>" for line in remarks(found))
    figures = escape(json.dumps(found.as_json(), indent=2))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan: {escape(found.question.target.shape.name)}</title>
<style>{LOOK}</style>
</head>
<body>
<main>
<h1>What to expect of {escape(found.question.target.shape.name)}</h1>
<p>{escape(title(found))}</p>
<div class="charts">
{drawn}
</div>
<h2>Batch by batch</h2>
<div class="wide">{_table(HEAD, cells(found))}</div>
{_splits(found)}
{said}
<details><summary>All figures and assumptions, as JSON</summary><pre>{figures}</pre></details>
</main>
</body>
</html>
"""


def _splits(found: Forecast) -> str:
    if not found.splits:
        return ""
    table = _table(SPLIT_HEAD, split_cells(found))
    return f'<h2>{escape(split_title(found))}</h2>\n<div class="wide">{table}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>\n{lines}\n</tbody></table>"
