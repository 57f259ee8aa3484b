"""The page of `bench never-slower --unseen`."""

from __future__ import annotations

from ..unseen import MIN_FIFTH, SLOW, UnseenResult, remarks, report_table
from .charts import Tile
from .render import render


def page(found: UnseenResult) -> str:
    """Render a run as a page."""
    least = min(found.cells, key=lambda cell: cell.fifth_percentile)
    return render(
        title="Foretell bench: never-slower, unseen requests",
        headline=f"5th percentile {least.fifth_percentile:.2f} of plain decoding or more",
        lead="Short requests never seen before, each compared with two runs of plain decoding.",
        tiles=[
            Tile(f"{least.fifth_percentile:.2f}", "lowest 5th percentile", f"the bar is {MIN_FIFTH:g}"),
            Tile(f"{max(cell.slow_share for cell in found.cells):.0%}", f"requests under {SLOW:g}"),
            Tile(found.verdict, "verdict", tone="bad" if found.verdict == "slower" else ""),
        ],
        charts=[],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
    )
