"""From a template and what it shows to one file of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.page.charts import ColumnChart, RowChart, Table, Tile
from foretell.bench.report import degree
from foretell.bench.transcripts import TextRecord, Version
from foretell.types import TARGET

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


@dataclass(frozen=True)
class ShownVersion:
    """Words, and whether somebody guessed them; none where they are those shown before."""

    name: str
    about: str
    same: bool | None
    runs: Sequence[tuple[bool, str]] = ()


@dataclass(frozen=True)
class ShownText:
    """One prompt and what came of it."""

    task: str
    name: str
    about: str
    prompt: str
    versions: Sequence[ShownVersion]


def shown_texts(records: Sequence[TextRecord]) -> list[ShownText]:
    """Those of one task together, however they were measured."""
    temperatures = len({record.temperature for record in records}) > 1
    return [_text(record, temperatures) for record in records]


def _text(record: TextRecord, temperatures: bool) -> ShownText:
    turn = f", turn {record.turn + 1}" if record.turn else ""
    heat = f", {degree(record.temperature)}" if temperatures else ""
    tokens = record.versions[0].tokens
    return ShownText(
        record.task, f"{record.item}{turn}{heat}", f"{tokens} tokens", record.prompt, _versions(record.versions)
    )


def _versions(versions: Sequence[Version]) -> list[ShownVersion]:
    """Plain decoding's words are left out where every other arm wrote the same: theirs show who guessed what."""
    plain, *others = versions
    found = [_version(each) for each in others]
    if not others or any(each.same is not True for each in others):
        found.insert(0, ShownVersion("plain decoding", f"{plain.tokens} tokens", None, [(False, plain.words)]))
    return found


def _version(version: Version) -> ShownVersion:
    runs = [(who != TARGET, words) for who, words in version.runs]
    return ShownVersion(version.arm, f"{version.guessed} of {version.tokens} tokens guessed", version.same, runs)
