"""From a template and what it shows to one file of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import ColumnChart, RowChart, Table, Tile

TEMPLATES = Path(__file__).parent / "templates"
Chart = RowChart | ColumnChart


def render(
    *,
    title: str,
    headline: str,
    lead: str,
    tiles: Sequence[Tile],
    charts: Sequence[Chart],
    table: Table,
    facts: Mapping[str, Any],
    remarks: Sequence[str] = (),
    warnings: Sequence[str] = (),
    texts: Sequence[Any] = (),
    guessed: bool = False,
) -> str:
    """The page; what a model wrote is shown as text and never as markup. `guessed`: texts show who proposed what."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["columns"] = lambda chart: isinstance(chart, ColumnChart)
    return environment.get_template("page.html").render(
        title=title,
        headline=headline,
        lead=lead,
        tiles=tiles,
        charts=charts,
        table=table,
        facts=flat(facts),
        remarks=remarks,
        warnings=warnings,
        texts=texts,
        guessed=guessed,
        version=facts.get("version", ""),
    )


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Facts in lines of name and value; those inside others carry both names."""
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        words = f"{before}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            found += flat(value, f"{words}: ")
        else:
            found.append((words, ", ".join(map(_word, value)) if isinstance(value, list | tuple) else _word(value)))
    return found


def _word(value: Any) -> str:
    """What was left open is so for a reason: each request or the engine decides."""
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
