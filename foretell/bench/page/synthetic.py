"""The page of `bench synthetic`."""

from __future__ import annotations

from collections.abc import Callable

from ..synthetic import MODE_LABELS, TOLERANCE, SyntheticCell, SyntheticResult, remarks, report_table
from .charts import (
    ChartRow,
    LegendEntry,
    Mark,
    RowChart,
    Tick,
    Tile,
    ratio_row,
    ratio_scale,
    ratio_values,
    value_scale,
)
from .render import render

COLOURS = {"sequence": "c0", "batch": "c1"}
LEGEND = [LegendEntry(words, COLOURS[mode]) for mode, words in MODE_LABELS.items()]


def page(found: SyntheticResult) -> str:
    """Render a run as a page."""
    furthest = max((cell.off for cell in found.cells if cell.mode == "sequence"), default=0.0)
    held = "within" if found.holds else "NOT within"
    return render(
        title="Foretell bench: synthetic",
        headline=f"Tokens per step are {held} {TOLERANCE:.0%} of the expected value",
        lead="An oracle drafts with a given acceptance rate: this is the speed of the engine at a known acceptance, "
        "not that of a drafter.",
        tiles=[
            Tile(f"{furthest:.2%}", "largest error", f"at most {TOLERANCE:.0%} is allowed"),
            Tile(str(sum(cell.drafts for cell in found.cells)), "drafts", "of full length"),
            Tile("yes" if found.same_text else "NO", "same text", "", "good" if found.same_text else "bad"),
        ],
        charts=[ratios(found), accepted(found)],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped early: this is the finished part."] if found.stopped else [],
    )


def ratios(found: SyntheticResult) -> RowChart:
    scale, ticks = ratio_scale(
        value for cell in found.cells for value in ratio_values(cell.speedup, cell.speedup_interval)
    )

    def row(cell: SyntheticCell) -> ChartRow:
        return ratio_row(MODE_LABELS[cell.mode], cell.speedup, cell.speedup_interval, scale, COLOURS[cell.mode])

    about = (
        "Over plain decoding, if each sequence of a batch keeps its own accepted tokens, and if all keep the fewest of "
        "the batch, as in engines that advance a batch in lockstep."
    )
    guide = Tick(scale.at(1.0), "plain")
    return RowChart("Speedup", about, _by_setting(found, row), ticks, LEGEND, guide)


def accepted(found: SyntheticResult) -> RowChart:
    values = [value for cell in found.cells for value in (cell.accepted_per_step, cell.expected_per_step)]
    scale, ticks = value_scale(values, low=1.0)

    def row(cell: SyntheticCell) -> ChartRow:
        expected = scale.at(cell.expected_per_step)
        bar = Mark("box", 0.0, max(scale.at(cell.accepted_per_step), 0.4), COLOURS[cell.mode])
        return ChartRow(
            MODE_LABELS[cell.mode], [bar, Mark("tick", expected, expected, "mark")], f"{cell.accepted_per_step:.2f}",
            f"expected {cell.expected_per_step:.2f}", f"{cell.drafts} drafts",
        )  # fmt: skip

    about = "Over steps with a full-length draft; the mark is the expected value."
    return RowChart("Tokens per step", about, _by_setting(found, row), ticks, LEGEND)


def _by_setting(found: SyntheticResult, row: Callable[[SyntheticCell], ChartRow]) -> list[ChartRow]:
    rows: list[ChartRow] = []
    for key in dict.fromkeys((cell.batch, cell.rate, cell.length) for cell in found.cells):
        batch, rate, length = key
        mine = [cell for cell in found.cells if (cell.batch, cell.rate, cell.length) == key]
        rows += [ChartRow(f"batch {batch}, {length} draft tokens accepted at {rate:g}", heading=True), *map(row, mine)]
    return rows
