"""The page of `bench compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.bench.compare import markdown, remarks

from ..compare import CompareCell, CompareFindings, CompareSample
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
from .render import ShownText, ShownVersion, render

_RowOf = Callable[[CompareCell], Row]


def page(found: CompareFindings) -> str:
    """All of a run on one page."""
    colours = {cell.arm: colour(place) for place, cell in enumerate(found.overall)}
    waits = [(cell.arm, colours[cell.arm], cell.first_token) for cell in found.overall]
    charts = [speeds(found, colours), ratios(found, colours), accepted(found, colours)]
    about = "From sending a request to its first words, the prompt being read anew each time."
    known = [(name, css, wait) for name, css, wait in waits if wait is not None]
    return render(
        title="Foretell bench: compare",
        headline=headline(found),
        lead="The same prompts, asked in turn: one after the other, arms interleaved, the first round dropped.",
        tiles=[_tile(cell) for cell in found.overall],
        charts=[*charts, waits_chart("How long the first words take", about, known)],
        table=table_of(markdown(found)),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped before its end: this is what was finished."] if found.stopped else [],
        texts=texts(found.samples, found.baseline),
    )


def headline(found: CompareFindings) -> str:
    timed = [cell for cell in found.overall if cell.speedup is not None and cell.arm != found.baseline]
    if not timed:
        return f"{len(found.overall)} peers, the same prompts"
    best = max(timed, key=lambda cell: cell.speedup or 0.0)
    return f"{best.arm} writes {best.speedup:.2f} times as fast as {found.baseline}"


def _tile(cell: CompareCell) -> Tile:
    figure = "–" if cell.tokens_per_second is None else f"{cell.tokens_per_second:.0f}"
    return Tile(figure, cell.arm, "tokens a second")


def speeds(found: CompareFindings, colours: dict[str, str]) -> RowChart:
    scale, ticks = value_scale([cell.tokens_per_second or 0.0 for cell in (*found.cells, *found.overall)])

    def row(cell: CompareCell) -> Row:
        if cell.tokens_per_second is None:
            return Row(cell.arm, value="–", more="; ".join(cell.reasons))
        shapes = [Shape("box", 0.0, scale.at(cell.tokens_per_second), colours[cell.arm])]
        return Row(cell.arm, shapes, f"{cell.tokens_per_second:.1f}", "tokens/s", f"{cell.tokens} tokens")

    rows = _by_task(found, row)
    return RowChart("Tokens a second", "Behind the first words, medians.", rows, ticks)


def ratios(found: CompareFindings, colours: dict[str, str]) -> RowChart:
    cells = (*found.cells, *found.overall)
    bounds = [bound for cell in cells for bound in (*(cell.speedup_interval or ()), cell.speedup or 1.0)]
    scale, ticks = ratio_scale(bounds)

    def row(cell: CompareCell) -> Row:
        if cell.speedup is None:
            return Row(cell.arm, value="–")
        low, high = cell.speedup_interval or (cell.speedup, cell.speedup)
        places = [scale.at(value) for value in (low, cell.speedup, high)]
        between = "" if cell.speedup_interval is None else f"{low:.2f} to {high:.2f}"
        return Row(cell.arm, interval_shapes(places, colours[cell.arm]), f"{cell.speedup:.2f}×", between)

    about = f"{found.baseline}'s time a token over the peer's, by pairs of the same prompt and round."
    guide = Tick(scale.at(1.0), found.baseline)
    return RowChart("How many times as fast", about, _by_task(found, row), ticks, guide=guide)


def accepted(found: CompareFindings, colours: dict[str, str]) -> RowChart:
    told = [cell for cell in found.overall if cell.accepted_per_step is not None]
    scale, ticks = value_scale([cell.accepted_per_step or 1.0 for cell in told], low=1.0)
    rows = [
        Row(
            cell.arm,
            [Shape("box", 0.0, max(scale.at(cell.accepted_per_step or 1.0), 0.4), colours[cell.arm])],
            f"{cell.accepted_per_step:.2f}",
        )
        for cell in told
    ]
    about = "Guesses that stood and the model's own token, where a peer tells; 1 is plain decoding."
    return RowChart("Tokens a step yields", about, rows, ticks)


def _by_task(found: CompareFindings, row: _RowOf) -> list[Row]:
    rows = [Row("all tasks", heading=True), *map(row, found.overall)]
    for task in dict.fromkeys(cell.task for cell in found.cells):
        rows += [Row(task, heading=True), *(row(cell) for cell in found.cells if cell.task == task)]
    return rows


def texts(samples: Sequence[CompareSample], baseline: str) -> list[ShownText]:
    """What each peer answered in the first round that counts."""
    first = [each for each in samples if each.round == 1]
    found: list[ShownText] = []
    for item in {each.item.id: each.item for each in first}.values():
        mine = [each for each in first if each.item.id == item.id]
        base = next((each.reply.text for each in mine if each.peer == baseline), None)
        versions = [_version(each, None if each.peer == baseline or base is None else base) for each in mine]
        prompt = item.text or "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in item.messages)
        found.append(ShownText(item.task, item.id, "", prompt, versions))
    return found


def _version(sample: CompareSample, base: str | None) -> ShownVersion:
    reply = sample.reply
    same = None if base is None else reply.text == base
    about = reply.error or f"{reply.tokens} tokens"
    return ShownVersion(sample.peer, about, same, [(False, reply.text)] if reply.text else [])
