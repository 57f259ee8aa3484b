"""The page of `bench load`."""

from __future__ import annotations

from collections.abc import Callable

from ..load import OFF, LoadCell, LoadResult, remarks, report_table
from ..metrics import Latency
from .charts import (
    ChartRow,
    Mark,
    RowChart,
    Tick,
    Tile,
    colour,
    latency_chart,
    ratio_row,
    ratio_scale,
    ratio_values,
    value_scale,
)
from .render import render


def page(found: LoadResult) -> str:
    """Render a run as a page."""
    variants = list(dict.fromkeys(cell.variant for cell in found.cells))
    colours = {variant: "plain" if variant == OFF else colour(index) for index, variant in enumerate(variants)}
    failed = [f"{found.errors} requests failed: see the remarks."] if found.errors else []
    stopped = ["The run was stopped early: this is the finished part."] if found.stopped else []
    return render(
        title="Foretell bench: load",
        headline=headline(found),
        lead="Clients that stream chats from a server. Variants take turns in time slices, so that noise of the "
        "machine affects all of them alike.",
        tiles=[
            Tile(f"{cell.tokens_per_second:.0f}", f"{cell.load}, {cell.variant}", "tokens/s") for cell in found.cells
        ],
        charts=[ratios(found, colours), speeds(found, colours), first_token(found, colours), per_token(found, colours)],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=[*failed, *stopped],
    )


def headline(found: LoadResult) -> str:
    ratios_by_load = [f"{ratio:.2f} at {load}" for load, ratio in found.auto_over_better.items()]
    return f"auto over the best other variant: {', '.join(ratios_by_load)}" if ratios_by_load else "A server under load"


def ratios(found: LoadResult, colours: dict[str, str]) -> RowChart:
    scale, ticks = ratio_scale(
        value for cell in found.cells for value in ratio_values(cell.speedup, cell.speedup_interval)
    )

    def row(cell: LoadCell) -> ChartRow:
        if cell.speedup is None:
            return ChartRow(cell.variant, value="–")
        return ratio_row(cell.variant, cell.speedup, cell.speedup_interval, scale, colours[cell.variant])

    about = "Tokens per second over those with speculation off, by pairs of slices."
    guide = Tick(scale.at(1.0), "off")
    return RowChart("Speedup", about, _by_load(found, row), ticks, guide=guide)


def speeds(found: LoadResult, colours: dict[str, str]) -> RowChart:
    scale, ticks = value_scale([cell.tokens_per_second for cell in found.cells])

    def row(cell: LoadCell) -> ChartRow:
        marks = [Mark("box", 0.0, scale.at(cell.tokens_per_second), colours[cell.variant])]
        return ChartRow(cell.variant, marks, f"{cell.tokens_per_second:.1f}", "tokens/s", f"{cell.requests} requests")

    return RowChart("Tokens per second", "Of all clients together.", _by_load(found, row), ticks)


def first_token(found: LoadResult, colours: dict[str, str]) -> RowChart:
    about = "From the request to its first token."
    return latency_chart("Time to first token", about, _latencies(found, colours, lambda cell: cell.first_token))


def per_token(found: LoadResult, colours: dict[str, str]) -> RowChart:
    about = "Mean per request, after the first token."
    return latency_chart("Time per token", about, _latencies(found, colours, lambda cell: cell.per_token))


def _latencies(
    found: LoadResult, colours: dict[str, str], times: Callable[[LoadCell], Latency | None]
) -> list[tuple[str, str, Latency]]:
    latencies = [(f"{cell.load}, {cell.variant}", colours[cell.variant], times(cell)) for cell in found.cells]
    return [(name, css, latency) for name, css, latency in latencies if latency is not None]


def _by_load(found: LoadResult, row: Callable[[LoadCell], ChartRow]) -> list[ChartRow]:
    rows: list[ChartRow] = []
    for load in dict.fromkeys(cell.load for cell in found.cells):
        rows += [ChartRow(load, heading=True), *(row(cell) for cell in found.cells if cell.load == load)]
    return rows
