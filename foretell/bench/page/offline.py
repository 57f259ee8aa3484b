"""The page of `bench offline` and `bench drafters`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from foretell.utils.report_table import ReportTable

from ..intervals import bounds_label
from ..metrics import AcceptanceByDepth
from ..report import SAME_TEXT, remarks, temperature_label, temperature_name
from ..results import BenchResult, TaskCell
from .charts import (
    ChartRow,
    Column,
    ColumnChart,
    LegendEntry,
    Mark,
    Panel,
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
from .render import Chart, render, shown_transcripts


@dataclass(frozen=True)
class Series:
    """One setting of a run; its name has only what differs between settings."""

    name: str
    colour: str
    overall: TaskCell
    cells: Sequence[TaskCell]


MANY = 3  # series, above which tasks are folded

RowOf = Callable[[str, TaskCell, str], ChartRow]  # of name, cell and colour


def series_of(result: BenchResult) -> list[Series]:
    """Return the settings of a run in the order they were measured."""
    settings = [_setting(cell) for cell in result.overall]
    _, temperatures, batches = (len({each[part] for each in settings}) > 1 for part in range(3))
    found: list[Series] = []
    for index, cell in enumerate(result.overall):
        words = [
            cell.variant,
            temperature_label(cell.temperature) if temperatures else "",
            f"batch {cell.batch}" if batches else "",
        ]
        mine = [each for each in result.cells if _setting(each) == _setting(cell)]
        found.append(Series(", ".join(filter(None, words)), colour(index), cell, mine))
    return found


def _setting(cell: TaskCell) -> tuple[str, float | None, int]:
    return cell.variant, cell.temperature, cell.batch


def by_task(series: Sequence[Series], row: RowOf) -> tuple[list[ChartRow], list[ChartRow]]:
    """Return the rows of a chart and the folded ones.

    One series has a row for each task. Several have a row each for all tasks, then a heading for each task; if there
    are many, the tasks are folded.
    """
    if len(series) == 1:
        (only,) = series
        rows = [row(cell.task, cell, only.colour) for cell in only.cells]
        return [*rows, row("all tasks", only.overall, only.colour)], []
    found: list[ChartRow] = []
    for task in dict.fromkeys(cell.task for each in series for cell in each.cells):
        mine = [row(each.name, cell, each.colour) for each in series for cell in each.cells if cell.task == task]
        found += [ChartRow(task, heading=True), *mine]
    overall = [ChartRow("all tasks", heading=True), *(row(each.name, each.overall, each.colour) for each in series)]
    return (overall, found) if len(series) > MANY else ([*overall, *found], [])


MIN_DRAFTS = 5  # drafts that reach a depth, below which its rate is not shown
PARTS = (
    ("drafting", "drafting", "draft"),
    ("running", "target forward and verification", "verify"),
    ("rest", "host", "host"),
)


def page(result: BenchResult) -> str:
    """Render a run as a page."""
    series = series_of(result)
    best = max(series, key=lambda each: each.overall.speedup or 0.0)
    charts: list[Chart] = [ratios(series), accepted(series), positions(series), time_split(series)]
    charts += [token_waits(series), output_waits(series)]
    return render(
        title=f"Foretell bench: {result.bench}",
        headline=headline(series, best),
        lead=lead(result),
        tiles=tiles(best.overall, result.same_text),
        charts=charts,
        table=table(result),
        facts=result.conditions,
        remarks=remarks(result),
        warnings=warnings(result),
        transcripts=shown_transcripts(result.transcripts),
        show_drafted=True,
    )


def headline(series: Sequence[Series], best: Series) -> str:
    ratio = best.overall.speedup
    if ratio is None:
        return "The outputs were too short to be timed"
    if len(series) > 1:
        return f"The fastest of {len(series)} settings, {best.name}, has a speedup of {ratio:.2f} over plain decoding"
    return f"{best.name} has a speedup of {ratio:.2f} over plain decoding"


def lead(result: BenchResult) -> str:
    machine = result.conditions.get("machine", {})
    where = f" on {machine['device']}" if "device" in machine else ""
    tasks = len(dict.fromkeys(cell.task for cell in result.cells))
    model = result.conditions.get("model", "a model")
    return (
        f"{model}{where}: {len(result.prompts)} prompts of {tasks} tasks, each plain and with speculation, interleaved "
        "in one run. Speedups have 95% t intervals over prompts and rounds."
    )


def warnings(result: BenchResult) -> list[str]:
    found = [] if result.same_text else ["Some outputs differ from plain decoding and must not: see the remarks."]
    return found if result.complete else [*found, "The run was stopped early: this is the finished part."]


_TONES: dict[str, Literal["", "good", "bad"]] = {"yes": "good", "NO": "bad", "not promised": ""}


def tiles(cell: TaskCell, same: bool) -> list[Tile]:
    ratio = "–" if cell.speedup is None else f"{cell.speedup:.2f}×"
    rates = [_rate(cell.plain_tokens_per_second), _rate(cell.tokens_per_second)]
    same_text = SAME_TEXT[cell.same_text if same else False]
    return [
        Tile(ratio, "speedup", bounds_label(cell.speedup_interval)),
        Tile(f"{cell.accepted_per_step:.2f}", "tokens per step", "1 is plain decoding"),
        Tile(rates[1], "tokens per second", f"plain: {rates[0]}"),
        Tile(
            same_text,
            "same text",
            f"{cell.sequences} sequences",
            _TONES[same_text],
        ),
    ]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def ratios(series: Sequence[Series]) -> RowChart:
    cells = [cell for each in series for cell in (*each.cells, each.overall)]
    scale, ticks = ratio_scale(value for cell in cells for value in ratio_values(cell.speedup, cell.speedup_interval))

    def row(name: str, cell: TaskCell, colour: str) -> ChartRow:
        if cell.speedup is None:
            return ChartRow(name, value="too short")
        note = f"{cell.sequences} sequences, {cell.tokens} tokens"
        return ratio_row(name, cell.speedup, cell.speedup_interval, scale, colour, note)

    rows, folded = by_task(series, row)
    return RowChart(
        "Speedup",
        "Time per token of plain decoding over that of the variant. The line through a dot is the 95% t interval "
        "over prompts and rounds.",
        rows,
        ticks,
        guide=Tick(scale.at(1.0), "plain"),
        folded=folded,
    )


def accepted(series: Sequence[Series]) -> RowChart:
    scale, ticks = value_scale([cell.accepted_per_step for each in series for cell in each.cells], low=1.0)

    def row(name: str, cell: TaskCell, colour: str) -> ChartRow:
        end = scale.at(cell.accepted_per_step)
        note = f"{cell.tokens} tokens in {cell.steps} steps"
        return ChartRow(name, [Mark("box", 0.0, max(end, 0.4), colour)], f"{cell.accepted_per_step:.2f}", note=note)

    rows, folded = by_task(series, row)
    return RowChart(
        "Tokens per step",
        "Accepted draft tokens and the target's own token; 1 is plain decoding. A step with a draft takes longer, so "
        "the speedup above is smaller.",
        rows,
        ticks,
        folded=folded,
    )


def positions(series: Sequence[Series]) -> ColumnChart:
    panels = [Panel(each.name, each.colour, _columns(each.overall.acceptance)) for each in series]
    return ColumnChart(
        "Acceptance by depth",
        "Percent of the drafts that reach a depth and are accepted up to it; 1 is the first draft token. "
        f"Depths that fewer than {MIN_DRAFTS} drafts reach are left out.",
        panels,
    )


def _columns(positions: AcceptanceByDepth) -> list[Column]:
    shares = [
        (index, reached, share)
        for index, (reached, share) in enumerate(zip(positions.reached, positions.rates, strict=True), start=1)
        if reached >= MIN_DRAFTS
    ]
    return [
        Column(round(100 * share, 1), str(index), f"{100 * share:.0f}", f"{share:.1%} of {reached} drafts")
        for index, reached, share in shares
    ]


def time_split(series: Sequence[Series]) -> RowChart:
    def row(name: str, cell: TaskCell, colour: str) -> ChartRow:
        marks, notes = [], []
        start = 0.0
        for part, words, css in PARTS:
            end = start + 100 * cell.time[part]
            marks.append(Mark("box", round(start, 2), round(min(end, 100.0), 2), css))
            notes.append(f"{words} {cell.time[part]:.1%}")
            start = end
        shares = [f"{100 * cell.time[part]:.0f}" for part, _, _ in PARTS]
        return ChartRow(name, marks, " / ".join(shares), "%", "; ".join(notes))

    _, ticks = value_scale([100.0], unit="%")
    rows, folded = by_task(series, row)
    return RowChart(
        "Time by component",
        "From the request to the end of its output, with the prompt in the prefix cache: drafting, the target's "
        "forward with verification, and the host.",
        rows,
        ticks,
        [LegendEntry(words, css) for _, words, css in PARTS],
        folded=folded,
    )


def token_waits(series: Sequence[Series]) -> RowChart:
    """Chart the time per token. Plain decoding comes first, as measured with the first series."""
    latencies = [("plain", "plain", series[0].overall.plain_token_seconds)]
    latencies += [(each.name, each.colour, each.overall.token_seconds) for each in series]
    found = [(name, css, latency) for name, css, latency in latencies if latency is not None]
    return latency_chart(
        "Time per token",
        "After the first token; the tokens of a step share its time.",
        found,
    )


def output_waits(series: Sequence[Series]) -> RowChart:
    """Chart the time per output, from its first token as for the speedup."""
    latencies = [("plain", "plain", series[0].overall.plain_decode_seconds)]
    latencies += [(each.name, each.colour, each.overall.decode_seconds) for each in series]
    found = [(name, css, latency) for name, css, latency in latencies if latency is not None]
    about = "From the first token to the end of the request or its batch, without prefill."
    return latency_chart("Time per output", about, found)


def table(result: BenchResult) -> ReportTable:
    head = [
        "task",
        "drafter",
        "T",
        "batch",
        "sequences",
        "tokens",
        "steps",
        "accepted per step",
        "speedup",
        "low",
        "high",
    ]
    head += ["tokens/s", "plain tokens/s", "noise", "same text"]
    return ReportTable(head, [_figures(cell) for cell in (*result.cells, *result.overall)], words=2)


def _figures(cell: TaskCell) -> list[str]:
    low, high = cell.speedup_interval or (None, None)
    ratios = ["–" if value is None else f"{value:.3f}" for value in (cell.speedup, low, high)]
    rates = [
        "–" if value is None else f"{value:.1f}" for value in (cell.tokens_per_second, cell.plain_tokens_per_second)
    ]
    counts = [str(value) for value in (cell.batch, cell.sequences, cell.tokens, cell.steps)]
    noise = "–" if cell.noise is None else f"{cell.noise:.1%}"
    names = [cell.task, cell.variant, temperature_name(cell.temperature)]
    return [*names, *counts, f"{cell.accepted_per_step:.3f}", *ratios, *rates, noise, SAME_TEXT[cell.same_text]]
