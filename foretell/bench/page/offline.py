"""The page of `bench offline` and `bench drafters`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.bench.latency import AcceptanceByDepth
from foretell.bench.page.charts import (
    Column,
    ColumnChart,
    Key,
    Panel,
    Row,
    RowChart,
    Shape,
    Table,
    Tick,
    Tile,
    colour,
    interval_shapes,
    ratio_scale,
    value_scale,
    waits_chart,
)
from foretell.bench.page.render import Chart, render, shown_texts
from foretell.bench.report import degree, remarks
from foretell.bench.results import Cell, Result


@dataclass(frozen=True)
class Series:
    """A setting of the run; its name has what differs and no more."""

    name: str
    colour: str
    overall: Cell
    cells: Sequence[Cell]


MANY = 3  # series, above which tasks are behind a click

RowOf = Callable[[str, Cell, str], Row]  # of a name, a cell and a colour


def series_of(result: Result) -> list[Series]:
    """In the order they were measured."""
    settings = [_setting(cell) for cell in result.overall]
    _, temperatures, batches = (len({each[part] for each in settings}) > 1 for part in range(3))
    found: list[Series] = []
    for place, cell in enumerate(result.overall):
        words = [cell.arm, degree(cell.temperature) if temperatures else "", f"{cell.batch} at once" if batches else ""]
        mine = [each for each in result.cells if _setting(each) == _setting(cell)]
        found.append(Series(", ".join(filter(None, words)), colour(place), cell, mine))
    return found


def _setting(cell: Cell) -> tuple[str, float | None, int]:
    return cell.arm, cell.temperature, cell.batch


def by_task(series: Sequence[Series], row: RowOf) -> tuple[list[Row], list[Row]]:
    """Rows of a chart, and those behind a click.

    One series has a row for each task; several have a row each over all tasks, and then a heading for each task; where
    there are many, the tasks are behind a click.
    """
    if len(series) == 1:
        (only,) = series
        rows = [row(cell.task, cell, only.colour) for cell in only.cells]
        return [*rows, row("all tasks", only.overall, only.colour)], []
    found: list[Row] = []
    for task in dict.fromkeys(cell.task for each in series for cell in each.cells):
        mine = [row(each.name, cell, each.colour) for each in series for cell in each.cells if cell.task == task]
        found += [Row(task, heading=True), *mine]
    overall = [Row("all tasks", heading=True), *(row(each.name, each.overall, each.colour) for each in series)]
    return (overall, found) if len(series) > MANY else ([*overall, *found], [])


FEWEST = 5  # drafts that reached a place, for its share to be shown
PARTS = (
    ("drafting", "guessing", "draft"),
    ("running", "checking: the target's forwards", "verify"),
    ("rest", "the host", "host"),
)


def page(result: Result) -> str:
    """All of a run on one page."""
    series = series_of(result)
    best = max(series, key=lambda each: each.overall.speedup or 0.0)
    charts: list[Chart] = [ratios(series), accepted(series), positions(series), time_split(series)]
    charts += [token_waits(series), text_waits(series)]
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
        texts=shown_texts(result.texts),
        guessed=True,
    )


def headline(series: Sequence[Series], best: Series) -> str:
    ratio = best.overall.speedup
    if ratio is None:
        return "The texts were too short to be timed"
    if len(series) > 1:
        return f"The fastest of {len(series)} settings, {best.name}, writes {ratio:.2f} times as fast as plain decoding"
    return f"With guesses by {best.name}, texts come {ratio:.2f} times as fast as by plain decoding"


def lead(result: Result) -> str:
    machine = result.conditions.get("machine", {})
    where = f" on {machine['device']}" if "device" in machine else ""
    tasks = len(dict.fromkeys(cell.task for cell in result.cells))
    model = result.conditions.get("model", "a model")
    return (
        f"{model}{where}: {len(result.prompts)} prompts of {tasks} tasks, each written plainly and with guesses in "
        "turn, in one run. Ratios come with 95% t intervals over prompts and rounds."
    )


def warnings(result: Result) -> list[str]:
    found = [] if result.same_text else ["Some texts differ from plain decoding's, and must not: see the remarks."]
    return found if result.complete else [*found, "The run was stopped before its end: this is what was finished."]


def tiles(cell: Cell, same: bool) -> list[Tile]:
    bounds = cell.speedup_interval
    between = "" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"
    ratio = "–" if cell.speedup is None else f"{cell.speedup:.2f}×"
    rates = [_rate(cell.plain_tokens_per_second), _rate(cell.tokens_per_second)]
    told = {True: "yes", False: "NO", None: "not promised"}[cell.same_text if same else False]
    return [
        Tile(ratio, "as fast as plain", between),
        Tile(f"{cell.accepted_per_step:.2f}", "tokens a step", "1 is plain decoding"),
        Tile(rates[1], "tokens a second", f"plain: {rates[0]}"),
        Tile(told, "same text", f"{cell.texts} texts", "good" if told == "yes" else "bad" if told == "NO" else ""),
    ]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def ratios(series: Sequence[Series]) -> RowChart:
    cells = [cell for each in series for cell in (*each.cells, each.overall)]
    bounds = [bound for cell in cells for bound in (*(cell.speedup_interval or ()), cell.speedup or 1.0)]
    scale, ticks = ratio_scale(bounds)

    def row(name: str, cell: Cell, colour: str) -> Row:
        if cell.speedup is None:
            return Row(name, value="too short")
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        places = [scale.at(value) for value in (low, cell.speedup, high)]
        between = "" if cell.speedup_interval is None else f"{low:.2f} to {high:.2f}"
        note = f"{cell.texts} texts, {cell.tokens} tokens"
        return Row(name, interval_shapes(places, colour), f"{cell.speedup:.2f}×", between, note)

    rows, folded = by_task(series, row)
    return RowChart(
        "How many times as fast",
        "Plain decoding's time a token over that with guesses. The line through a dot is the 95% t interval "
        "over prompts and rounds.",
        rows,
        ticks,
        guide=Tick(scale.at(1.0), "plain"),
        folded=folded,
    )


def accepted(series: Sequence[Series]) -> RowChart:
    scale, ticks = value_scale([cell.accepted_per_step for each in series for cell in each.cells], low=1.0)

    def row(name: str, cell: Cell, colour: str) -> Row:
        end = scale.at(cell.accepted_per_step)
        note = f"{cell.tokens} tokens in {cell.steps} steps"
        return Row(name, [Shape("box", 0.0, max(end, 0.4), colour)], f"{cell.accepted_per_step:.2f}", note=note)

    rows, folded = by_task(series, row)
    return RowChart(
        "Tokens a step yields",
        "Guesses that stood and the model's own token; 1 is plain decoding. A step with guesses takes somewhat longer, "
        "so the ratio above is smaller.",
        rows,
        ticks,
        folded=folded,
    )


def positions(series: Sequence[Series]) -> ColumnChart:
    panels = [Panel(each.name, each.colour, _columns(each.overall.places)) for each in series]
    return ColumnChart(
        "How far guesses stand",
        "Of the drafts that reach a place, how many in a hundred stand up to it; 1 is the first guess. "
        f"Places that fewer than {FEWEST} drafts reached are left out.",
        panels,
    )


def _columns(places: AcceptanceByDepth) -> list[Column]:
    shares = [
        (place, reached, share)
        for place, (reached, share) in enumerate(zip(places.reached, places.shares, strict=True), start=1)
        if reached >= FEWEST
    ]
    return [
        Column(round(100 * share, 1), str(place), f"{100 * share:.0f}", f"{share:.1%} of {reached} drafts")
        for place, reached, share in shares
    ]


def time_split(series: Sequence[Series]) -> RowChart:
    def row(name: str, cell: Cell, colour: str) -> Row:
        shapes, start, told = [], 0.0, []
        for part, words, css in PARTS:
            end = start + 100 * cell.time[part]
            shapes.append(Shape("box", round(start, 2), round(min(end, 100.0), 2), css))
            told.append(f"{words} {cell.time[part]:.1%}")
            start = end
        shares = [f"{100 * cell.time[part]:.0f}" for part, _, _ in PARTS]
        return Row(name, shapes, " / ".join(shares), "%", "; ".join(told))

    _, ticks = value_scale([100.0], unit="%")
    rows, folded = by_task(series, row)
    return RowChart(
        "Where the time goes",
        "From asking to the end of a text, prompts being cached: guessing, checking in the target's forwards, and the "
        "rest, which is the host's.",
        rows,
        ticks,
        [Key(words, css) for _, words, css in PARTS],
        folded=folded,
    )


def token_waits(series: Sequence[Series]) -> RowChart:
    """Plain decoding first: it was measured beside each series, and that beside the first will do."""
    waits = [("plain", "plain", series[0].overall.plain_token_seconds)]
    waits += [(each.name, each.colour, each.overall.token_seconds) for each in series]
    found = [(name, css, wait) for name, css, wait in waits if wait is not None]
    return waits_chart(
        "How long a token takes",
        "Behind a text's first token; a step that brings several shares its time among them.",
        found,
    )


def text_waits(series: Sequence[Series]) -> RowChart:
    """The same of whole texts."""
    waits = [("plain", "plain", series[0].overall.plain_text_seconds)]
    waits += [(each.name, each.colour, each.overall.text_seconds) for each in series]
    found = [(name, css, wait) for name, css, wait in waits if wait is not None]
    about = "From asking to the end, prompts being cached; texts that are written at once end together."
    return waits_chart("How long a text takes", about, found)


def table(result: Result) -> Table:
    head = ["task", "drafter", "T", "at once", "texts", "tokens", "steps", "accepted per step", "ratio", "low", "high"]
    head += ["tokens/s", "plain tokens/s", "noise", "same text"]
    return Table(head, [_figures(cell) for cell in (*result.cells, *result.overall)], words=2)


def _figures(cell: Cell) -> list[str]:
    low, high = cell.speedup_interval or (None, None)
    ratios = ["–" if value is None else f"{value:.3f}" for value in (cell.speedup, low, high)]
    rates = [
        "–" if value is None else f"{value:.1f}" for value in (cell.tokens_per_second, cell.plain_tokens_per_second)
    ]
    counts = [str(value) for value in (cell.batch, cell.texts, cell.tokens, cell.steps)]
    noise = "–" if cell.noise is None else f"{cell.noise:.1%}"
    same = {True: "yes", False: "NO", None: "not promised"}[cell.same_text]
    degrees = degree(cell.temperature).removeprefix("T=").removeprefix("T ")
    return [cell.task, cell.arm, degrees, *counts, f"{cell.accepted_per_step:.3f}", *ratios, *rates, noise, same]
