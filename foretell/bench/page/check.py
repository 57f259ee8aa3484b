"""The page of `bench check`."""

from __future__ import annotations

from foretell.bench.check import markdown, remarks

from ..check import OFF, CheckFindings
from ..compare import ALL
from .charts import Row, RowChart, Shape, Tick, Tile, interval_shapes, ratio_scale, table_of, value_scale
from .compare import texts
from .render import render


def page(found: CheckFindings) -> str:
    """A dozen requests on one page."""
    facts = found.facts
    wrong = ["A text with guesses differs from the one without."] if facts.same_text is False else []
    return render(
        title="Foretell bench: check",
        headline=facts.words.partition(":")[0],
        lead=facts.words,
        tiles=[
            Tile(_figure(facts.speedup, "×"), "as fast as without", "by pairs of the same prompt"),
            Tile(_figure(facts.accepted_per_step), "tokens a step", "1 is plain decoding"),
            Tile(f"{facts.requests_per_second:.2f}", "requests a second", "one after the other"),
            Tile({True: "yes", False: "NO", None: "–"}[facts.same_text], "same text", f"{facts.requests} requests"),
        ],
        charts=[chart for chart in (ratios(found), accepted(found)) if chart.rows],
        table=table_of(markdown(found)),
        facts=found.conditions,
        remarks=remarks(found),
        warnings=wrong,
        texts=texts(found.samples, OFF),
    )


def _figure(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.2f}{unit}"


def ratios(found: CheckFindings) -> RowChart:
    told = (*found.cells, found.overall)
    known = [(each, each["speedup_interval"] or (each["speedup"],) * 2) for each in told if each["speedup"] is not None]
    scale, ticks = ratio_scale([value for each, bounds in known for value in (*bounds, each["speedup"])])
    rows = [
        Row(
            "all tasks" if each["task"] == ALL else each["task"],
            interval_shapes([scale.at(value) for value in (low, each["speedup"], high)], "c0"),
            f"{each['speedup']:.2f}×",
            "" if each["speedup_interval"] is None else f"{low:.2f} to {high:.2f}",
        )
        for each, (low, high) in known
    ]
    about = "One request with guesses and one without, next to each other."
    return RowChart("How many times as fast", about, rows, ticks, guide=Tick(scale.at(1.0), "without"))


def accepted(found: CheckFindings) -> RowChart:
    known = [(cell["task"], cell["accepted_per_step"]) for cell in found.cells if cell["accepted_per_step"] is not None]
    scale, ticks = value_scale([each for _, each in known], low=1.0)
    rows = [Row(task, [Shape("box", 0.0, max(scale.at(each), 0.4), "c0")], f"{each:.2f}") for task, each in known]
    return RowChart("Tokens a step yields", "Guesses that stood and the model's own token.", rows, ticks)
