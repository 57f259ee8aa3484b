"""The page of `bench synthetic`."""

from __future__ import annotations

from collections.abc import Callable

from foretell.bench.synthetic import WORDS, markdown, remarks

from ..synthetic import TOLERANCE, SyntheticCell, SyntheticFindings
from .charts import Key, Row, RowChart, Shape, Tick, Tile, interval_shapes, ratio_scale, table_of, value_scale
from .render import render

COLOURS = {"sequence": "c0", "batch": "c1"}
LEGEND = [Key(words, COLOURS[mode]) for mode, words in WORDS.items()]


def page(found: SyntheticFindings) -> str:
    """All of a run on one page."""
    furthest = max((cell.off for cell in found.cells if cell.mode == "sequence"), default=0.0)
    held = "within" if found.holds else "NOT within"
    return render(
        title="Foretell bench: synthetic",
        headline=f"Tokens a step are {held} {TOLERANCE:.0%} of what the law of independent guesses gives",
        lead="An oracle makes the guesses, right at a set rate: this is the engine's speed at a known acceptance. "
        "It is no model's, and its texts are the plain ones.",
        tiles=[
            Tile(f"{furthest:.2%}", "farthest from the law", f"at most {TOLERANCE:.0%} will do"),
            Tile(str(sum(cell.drafts for cell in found.cells)), "drafts", "whole ones"),
            Tile("yes" if found.same_text else "NO", "same text", "", "good" if found.same_text else "bad"),
        ],
        charts=[ratios(found), accepted(found)],
        table=table_of(markdown(found)),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped before its end: this is what was finished."] if found.stopped else [],
    )


def ratios(found: SyntheticFindings) -> RowChart:
    bounds = [bound for cell in found.cells for bound in (*(cell.speedup_interval or ()), cell.speedup)]
    scale, ticks = ratio_scale(bounds)

    def row(cell: SyntheticCell) -> Row:
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        places = [scale.at(value) for value in (low, cell.speedup, high)]
        between = "" if cell.speedup_interval is None else f"{low:.2f} to {high:.2f}"
        return Row(WORDS[cell.mode], interval_shapes(places, COLOURS[cell.mode]), f"{cell.speedup:.2f}×", between)

    about = (
        "Over plain decoding, where each text of a batch keeps what stands of its own draft, and where all keep only "
        "what stands for every text, as engines do that advance a batch in step."
    )
    guide = Tick(scale.at(1.0), "plain")
    return RowChart("How many times as fast", about, _by_setting(found, row), ticks, LEGEND, guide)


def accepted(found: SyntheticFindings) -> RowChart:
    values = [value for cell in found.cells for value in (cell.accepted_per_step, cell.expected_per_step)]
    scale, ticks = value_scale(values, low=1.0)

    def row(cell: SyntheticCell) -> Row:
        law = scale.at(cell.expected_per_step)
        bar = Shape("box", 0.0, max(scale.at(cell.accepted_per_step), 0.4), COLOURS[cell.mode])
        return Row(
            WORDS[cell.mode], [bar, Shape("tick", law, law, "mark")], f"{cell.accepted_per_step:.2f}",
            f"law {cell.expected_per_step:.2f}", f"{cell.drafts} drafts",
        )  # fmt: skip

    about = "Counted over steps with a whole draft; the mark is the law."
    return RowChart("Tokens a step yields", about, _by_setting(found, row), ticks, LEGEND)


def _by_setting(found: SyntheticFindings, row: Callable[[SyntheticCell], Row]) -> list[Row]:
    rows: list[Row] = []
    for key in dict.fromkeys((cell.batch, cell.rate, cell.length) for cell in found.cells):
        batch, rate, length = key
        mine = [cell for cell in found.cells if (cell.batch, cell.rate, cell.length) == key]
        rows += [Row(f"{batch} at once, {length} guesses right at {rate:g}", heading=True), *map(row, mine)]
    return rows
