"""The pages of `bench never-slower` and of its unseen requests."""

from __future__ import annotations

from .. import unseen
from ..never_slower import ALL, NeverSlowerCell, NeverSlowerResult, remarks, report_table
from .charts import ChartRow, LegendEntry, Mark, RowChart, Tick, Tile, interval_marks, ratio_scale, ratio_values
from .render import render

VERDICTS = {"held": "c2", "slower": "c6", "inconclusive": "c4"}
WORDS = {"held": "holds its bar", "slower": "below its bar", "inconclusive": "inconclusive"}


def page(found: NeverSlowerResult) -> str:
    """Render a run as a page."""
    mean = next(each for each in found.overall if each.drafter == ALL)
    counts = {verdict: sum(cell.verdict == verdict for cell in found.cells) for verdict in VERDICTS}
    return render(
        title="Foretell bench: never-slower",
        headline=f"{counts['held']} of {len(found.cells)} cells hold their bar, {counts['slower']} are below it",
        lead="The adaptive controller against plain decoding and fixed draft lengths, variants interleaved.",
        tiles=[
            Tile(f"{mean.speedup:.2f}×", "speedup over plain", "mean of all cells"),
            Tile(f"{mean.accepted_per_step:.2f}", "tokens per step", "1 is plain decoding"),
            Tile(found.verdict, "verdict", tone="bad" if found.verdict == "slower" else ""),
            Tile("yes" if found.same_text else "NO", "same text", tone="good" if found.same_text else "bad"),
        ],
        charts=[ratios(found)],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped early: this is the finished part."] if found.stopped else [],
    )


def ratios(found: NeverSlowerResult) -> RowChart:
    scale, ticks = ratio_scale(
        value
        for cell in found.cells
        for value in (*ratio_values(cell.speedup, cell.speedup_interval), *cell.fixed.values())
    )

    def row(cell: NeverSlowerCell) -> ChartRow:
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        positions = [scale.at(value) for value in (low, cell.speedup, high)]
        bar = scale.at(cell.bar)
        fixed = [Mark("dot", scale.at(value), scale.at(value), "plain") for k, value in cell.fixed.items() if k]
        marks = [*fixed, *interval_marks(positions, VERDICTS[cell.verdict]), Mark("tick", bar, bar, "mark")]
        lengths = ", ".join(f"{length}: {value:.2f}" for length, value in cell.fixed.items() if length)
        name = f"{cell.drafter}, T={cell.temperature:g}, batch {cell.batch}"
        return ChartRow(name, marks, f"{cell.speedup:.2f}×", f"bar {cell.bar:.2f}", f"fixed lengths {lengths}")

    rows: list[ChartRow] = []
    for task in dict.fromkeys(cell.task for cell in found.cells):
        rows += [ChartRow(task, heading=True), *(row(cell) for cell in found.cells if cell.task == task)]
    legend = [
        *(LegendEntry(WORDS[verdict], css) for verdict, css in VERDICTS.items()),
        LegendEntry("fixed length", "plain"),
    ]
    about = "Coloured: adaptive, with a 95% t interval over rounds. The mark is the bar to reach."
    return RowChart("Speedup over plain decoding", about, rows, ticks, legend, Tick(scale.at(1.0), "plain"))


def unseen_page(found: unseen.UnseenResult) -> str:
    """Render a run as a page."""
    least = min(found.cells, key=lambda cell: cell.fifth_percentile)
    return render(
        title="Foretell bench: never-slower, unseen requests",
        headline=f"5th percentile {least.fifth_percentile:.2f} of plain decoding or more",
        lead="Short requests never seen before, each compared with plain decoding, and plain decoding with itself.",
        tiles=[
            Tile(f"{least.fifth_percentile:.2f}", "lowest 5th percentile", f"the bar is {unseen.MIN_FIFTH:g}"),
            Tile(f"{max(cell.slow_share for cell in found.cells):.0%}", f"requests under {unseen.SLOW:g}"),
            Tile(found.verdict, "verdict", tone="bad" if found.verdict == "slower" else ""),
        ],
        charts=[],
        table=unseen.report_table(found),
        facts=found.conditions,
        remarks=unseen.remarks(found),
    )
