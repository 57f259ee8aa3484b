"""The page of `bench check`."""

from __future__ import annotations

from ..check import OFF, CheckResult, remarks, report_table
from ..compare import ALL
from .charts import ChartRow, Mark, RowChart, Tick, Tile, ratio_row, ratio_scale, ratio_values, value_scale
from .compare import transcripts
from .render import render


def page(found: CheckResult) -> str:
    """Render a check as a page."""
    facts = found.facts
    wrong = ["An output with speculation differs from the one without."] if facts.same_text is False else []
    return render(
        title="Foretell bench: check",
        headline=facts.message.partition(":")[0],
        lead=facts.message,
        tiles=[
            Tile(_figure(facts.speedup, "×"), "speedup", "by pairs of the same prompt"),
            Tile(_figure(facts.accepted_per_step), "tokens per step", "1 is plain decoding"),
            Tile(f"{facts.requests_per_second:.2f}", "requests per second", "sequential"),
            Tile({True: "yes", False: "NO", None: "–"}[facts.same_text], "same text", f"{facts.requests} requests"),
        ],
        charts=[chart for chart in (ratios(found), accepted(found)) if chart.rows],
        table=report_table(found),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=wrong,
        transcripts=transcripts(found.samples, OFF),
    )


def _figure(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.2f}{unit}"


def ratios(found: CheckResult) -> RowChart:
    cells = (*found.cells, found.overall)
    known = [
        ("all tasks" if each["task"] == ALL else each["task"], each["speedup"], each["speedup_interval"])
        for each in cells
        if each["speedup"] is not None
    ]
    scale, ticks = ratio_scale(value for _, ratio, between in known for value in ratio_values(ratio, between))
    rows = [ratio_row(name, ratio, between, scale, "c0") for name, ratio, between in known]
    about = "Each prompt with and without speculation, next to each other."
    return RowChart("Speedup", about, rows, ticks, guide=Tick(scale.at(1.0), "without"))


def accepted(found: CheckResult) -> RowChart:
    known = [(cell["task"], cell["accepted_per_step"]) for cell in found.cells if cell["accepted_per_step"] is not None]
    scale, ticks = value_scale([each for _, each in known], low=1.0)
    rows = [ChartRow(task, [Mark("box", 0.0, max(scale.at(each), 0.4), "c0")], f"{each:.2f}") for task, each in known]
    return RowChart("Tokens per step", "Accepted draft tokens and the target's own token.", rows, ticks)
