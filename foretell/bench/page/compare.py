"""The page of `bench compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..compare import CompareCell, CompareResult, CompareSample, remarks, report_table
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
from .render import ShownTranscript, ShownVersion, render

_RowOf = Callable[[CompareCell], ChartRow]


def page(found: CompareResult) -> str:
    """Render a run as a page."""
    colours = {cell.peer: colour(index) for index, cell in enumerate(found.overall)}
    latencies = [(cell.peer, colours[cell.peer], cell.first_token) for cell in found.overall]
    charts = [speeds(found, colours), ratios(found, colours), accepted(found, colours)]
    about = "From the request to its first token; the prompt is not in the prefix cache."
    known = [(name, css, latency) for name, css, latency in latencies if latency is not None]
    return render(
        title="Foretell bench: compare",
        headline=headline(found),
        lead="The same prompts for every peer, sequential and interleaved, the first round dropped.",
        tiles=[_tile(cell) for cell in found.overall],
        charts=[*charts, latency_chart("Time to first token", about, known)],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=["The run was stopped early: this is the finished part."] if found.stopped else [],
        transcripts=transcripts(found.samples, found.baseline),
    )


def headline(found: CompareResult) -> str:
    timed = [cell for cell in found.overall if cell.speedup is not None and cell.peer != found.baseline]
    if not timed:
        return f"{len(found.overall)} peers, the same prompts"
    best = max(timed, key=lambda cell: cell.speedup or 0.0)
    return f"{best.peer} has a speedup of {best.speedup:.2f} over {found.baseline}"


def _tile(cell: CompareCell) -> Tile:
    figure = "–" if cell.tokens_per_second is None else f"{cell.tokens_per_second:.0f}"
    return Tile(figure, cell.peer, "tokens per second")


def speeds(found: CompareResult, colours: dict[str, str]) -> RowChart:
    scale, ticks = value_scale([cell.tokens_per_second or 0.0 for cell in (*found.cells, *found.overall)])

    def row(cell: CompareCell) -> ChartRow:
        if cell.tokens_per_second is None:
            return ChartRow(cell.peer, value="–", more="; ".join(cell.reasons))
        marks = [Mark("box", 0.0, scale.at(cell.tokens_per_second), colours[cell.peer])]
        return ChartRow(cell.peer, marks, f"{cell.tokens_per_second:.1f}", "tokens/s", f"{cell.tokens} tokens")

    rows = _by_task(found, row)
    return RowChart("Tokens per second", "After the first token, medians.", rows, ticks)


def ratios(found: CompareResult, colours: dict[str, str]) -> RowChart:
    cells = (*found.cells, *found.overall)
    scale, ticks = ratio_scale(value for cell in cells for value in ratio_values(cell.speedup, cell.speedup_interval))

    def row(cell: CompareCell) -> ChartRow:
        if cell.speedup is None:
            return ChartRow(cell.peer, value="–")
        return ratio_row(cell.peer, cell.speedup, cell.speedup_interval, scale, colours[cell.peer])

    about = f"Time per token of {found.baseline} over that of the peer, by pairs of the same prompt and round."
    guide = Tick(scale.at(1.0), found.baseline)
    return RowChart("Speedup", about, _by_task(found, row), ticks, guide=guide)


def accepted(found: CompareResult, colours: dict[str, str]) -> RowChart:
    with_steps = [cell for cell in found.overall if cell.accepted_per_step is not None]
    scale, ticks = value_scale([cell.accepted_per_step or 1.0 for cell in with_steps], low=1.0)
    rows = [
        ChartRow(
            cell.peer,
            [Mark("box", 0.0, max(scale.at(cell.accepted_per_step or 1.0), 0.4), colours[cell.peer])],
            f"{cell.accepted_per_step:.2f}",
        )
        for cell in with_steps
    ]
    about = "Accepted draft tokens and the target's own token, if a peer reports them; 1 is plain decoding."
    return RowChart("Tokens per step", about, rows, ticks)


def _by_task(found: CompareResult, row: _RowOf) -> list[ChartRow]:
    rows = [ChartRow("all tasks", heading=True), *map(row, found.overall)]
    for task in dict.fromkeys(cell.task for cell in found.cells):
        rows += [ChartRow(task, heading=True), *(row(cell) for cell in found.cells if cell.task == task)]
    return rows


def transcripts(samples: Sequence[CompareSample], baseline: str) -> list[ShownTranscript]:
    """Return the replies of each peer in the first measured round."""
    first = [each for each in samples if each.round == 1]
    found: list[ShownTranscript] = []
    for item in {each.prompt.id: each.prompt for each in first}.values():
        mine = [each for each in first if each.prompt.id == item.id]
        base = next((each.reply.text for each in mine if each.peer == baseline), None)
        versions = [_version(each, None if each.peer == baseline or base is None else base) for each in mine]
        prompt = item.text or "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in item.messages)
        found.append(ShownTranscript(item.task, item.id, "", prompt, versions))
    return found


def _version(sample: CompareSample, base: str | None) -> ShownVersion:
    reply = sample.reply
    same = None if base is None else reply.text == base
    about = reply.error or f"{reply.tokens} tokens"
    return ShownVersion(sample.peer, about, same, [(False, reply.text)] if reply.text else [])
