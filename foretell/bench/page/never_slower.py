"""The page of `bench never-slower`."""

from __future__ import annotations

from foretell.bench.never_slower import markdown, remarks

from ..never_slower import ALL, Cell, Findings
from .charts import Key, Row, RowChart, Shape, Tick, Tile, interval_shapes, ratio_scale, table_of
from .render import render

VERDICTS = {"held": "c2", "slower": "c6", "inconclusive": "c4"}
WORDS = {"held": "holds its bar", "slower": "below its bar", "inconclusive": "too noisy to tell"}


def page(found: Findings) -> str:
    """All of a run on one page."""
    mean = next(each for each in found.overall if each.drafter == ALL)
    counts = {verdict: sum(cell.verdict == verdict for cell in found.cells) for verdict in VERDICTS}
    return render(
        title="Foretell bench: never-slower",
        headline=f"{counts['held']} of {len(found.cells)} cells hold their bar, {counts['slower']} are below it",
        lead="The adaptive controller against plain decoding and against fixed lengths, arms interleaved.",
        tiles=[
            Tile(f"{mean.speedup:.2f}×", "as fast as plain", "mean of all cells"),
            Tile(f"{mean.accepted_per_step:.2f}", "tokens a step", "1 is plain decoding"),
            Tile(found.verdict, "verdict", tone="bad" if found.verdict == "slower" else ""),
            Tile("yes" if found.same_text else "NO", "same text", tone="good" if found.same_text else "bad"),
        ],
        charts=[ratios(found)],
        table=table_of(markdown(found)),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped before its end: this is what was finished."] if found.stopped else [],
    )


def ratios(found: Findings) -> RowChart:
    bounds = [
        bound for cell in found.cells for bound in (*(cell.speedup_interval or ()), cell.speedup, *cell.fixed.values())
    ]
    scale, ticks = ratio_scale(bounds)

    def row(cell: Cell) -> Row:
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        places = [scale.at(value) for value in (low, cell.speedup, high)]
        bar = scale.at(cell.bar)
        fixed = [Shape("dot", scale.at(value), scale.at(value), "plain") for k, value in cell.fixed.items() if k]
        shapes = [*fixed, *interval_shapes(places, VERDICTS[cell.verdict]), Shape("tick", bar, bar, "mark")]
        lengths = ", ".join(f"{length}: {value:.2f}" for length, value in cell.fixed.items() if length)
        name = f"{cell.drafter}, T={cell.temperature:g}, {cell.batch} at once"
        return Row(name, shapes, f"{cell.speedup:.2f}×", f"bar {cell.bar:.2f}", f"fixed lengths {lengths}")

    rows: list[Row] = []
    for task in dict.fromkeys(cell.task for cell in found.cells):
        rows += [Row(task, heading=True), *(row(cell) for cell in found.cells if cell.task == task)]
    legend = [*(Key(WORDS[verdict], css) for verdict, css in VERDICTS.items()), Key("a fixed length", "plain")]
    about = "Coloured: adaptive, with a 95% t interval over rounds. The mark is the bar it must reach."
    return RowChart("How many times as fast as plain", about, rows, ticks, legend, Tick(scale.at(1.0), "plain"))
