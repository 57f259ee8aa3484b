"""The page of `bench load`."""

from __future__ import annotations

from collections.abc import Callable

from foretell.bench.load import markdown, remarks

from ..latency import Latency
from ..load import OFF, LoadCell, LoadFindings
from .charts import (
    Row,
    RowChart,
    Shape,
    Tick,
    Tile,
    colour,
    interval_shapes,
    ratio_scale,
    table_of,
    value_scale,
    waits_chart,
)
from .render import render


def page(found: LoadFindings) -> str:
    """All of a run on one page."""
    arms = list(dict.fromkeys(cell.arm for cell in found.cells))
    colours = {arm: "plain" if arm == OFF else colour(place) for place, arm in enumerate(arms)}
    failed = [f"{found.errors} requests failed: see the remarks."] if found.errors else []
    stopped = ["The run was stopped before its end: this is what was finished."] if found.stopped else []
    return render(
        title="Foretell bench: load",
        headline=headline(found),
        lead="Callers who stream chats from a server; arms take turns in slices of time, so that what the machine does "
        "to one it does to all.",
        tiles=[Tile(f"{cell.tokens_per_second:.0f}", f"{cell.load}, {cell.arm}", "tokens/s") for cell in found.cells],
        charts=[ratios(found, colours), speeds(found, colours), first_words(found, colours), a_token(found, colours)],
        table=table_of(markdown(found)),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=[*failed, *stopped],
    )


def headline(found: LoadFindings) -> str:
    told = [f"{ratio:.2f} at {load}" for load, ratio in found.auto_over_better.items()]
    return f"auto over the better of the others: {', '.join(told)}" if told else "A server under load"


def ratios(found: LoadFindings, colours: dict[str, str]) -> RowChart:
    bounds = [bound for cell in found.cells for bound in (*(cell.speedup_interval or ()), cell.speedup or 1.0)]
    scale, ticks = ratio_scale(bounds)

    def row(cell: LoadCell) -> Row:
        if cell.speedup is None:
            return Row(cell.arm, value="–")
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        places = [scale.at(value) for value in (low, cell.speedup, high)]
        between = "" if cell.speedup_interval is None else f"{low:.2f} to {high:.2f}"
        return Row(cell.arm, interval_shapes(places, colours[cell.arm]), f"{cell.speedup:.2f}×", between)

    about = "Tokens a second over those with speculation off, by pairs of slices."
    guide = Tick(scale.at(1.0), "off")
    return RowChart("How many times as fast", about, _by_load(found, row), ticks, guide=guide)


def speeds(found: LoadFindings, colours: dict[str, str]) -> RowChart:
    scale, ticks = value_scale([cell.tokens_per_second for cell in found.cells])

    def row(cell: LoadCell) -> Row:
        shapes = [Shape("box", 0.0, scale.at(cell.tokens_per_second), colours[cell.arm])]
        return Row(cell.arm, shapes, f"{cell.tokens_per_second:.1f}", "tokens/s", f"{cell.requests} requests")

    return RowChart("Tokens a second", "Of all callers together.", _by_load(found, row), ticks)


def first_words(found: LoadFindings, colours: dict[str, str]) -> RowChart:
    about = "From sending a request to its first words."
    return waits_chart("First words", about, _waits(found, colours, lambda cell: cell.first_token))


def a_token(found: LoadFindings, colours: dict[str, str]) -> RowChart:
    about = "Behind the first words, by texts: of each the mean."
    return waits_chart("A token", about, _waits(found, colours, lambda cell: cell.per_token))


def _waits(
    found: LoadFindings, colours: dict[str, str], times: Callable[[LoadCell], Latency | None]
) -> list[tuple[str, str, Latency]]:
    waits = [(f"{cell.load}, {cell.arm}", colours[cell.arm], times(cell)) for cell in found.cells]
    return [(name, css, wait) for name, css, wait in waits if wait is not None]


def _by_load(found: LoadFindings, row: Callable[[LoadCell], Row]) -> list[Row]:
    rows: list[Row] = []
    for load in dict.fromkeys(cell.load for cell in found.cells):
        rows += [Row(load, heading=True), *(row(cell) for cell in found.cells if cell.load == load)]
    return rows
