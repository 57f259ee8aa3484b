"""Rendering of a page from the template, and the transcripts that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.types import TARGET
from foretell.utils.report_table import ReportTable

from ..report import temperature_label
from ..transcripts import Transcript, TranscriptVersion
from .charts import ColumnChart, RowChart, Tile

TEMPLATES = Path(__file__).parent / "templates"
Chart = RowChart | ColumnChart


def render(
    *,
    title: str,
    headline: str,
    lead: str,
    tiles: Sequence[Tile],
    charts: Sequence[Chart],
    table: ReportTable,
    facts: Mapping[str, Any],
    remarks: Sequence[str] = (),
    warnings: Sequence[str] = (),
    transcripts: Sequence[Any] = (),
    show_drafted: bool = False,
) -> str:
    """Render a page. Model output is escaped; `show_drafted` marks accepted draft tokens in it."""
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
        transcripts=transcripts,
        show_drafted=show_drafted,
        version=facts.get("version", ""),
    )


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Flatten nested facts to (name, value) lines; a nested name has its parent's as prefix."""
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{before}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            found += flat(value, f"{label}: ")
        else:
            found.append((label, ", ".join(map(_word, value)) if isinstance(value, list | tuple) else _word(value)))
    return found


def _word(value: Any) -> str:
    """Format a value; None is a setting left to the request or the engine."""
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class ShownVersion:
    """The output of one variant as (drafted, text) runs; empty if it equals the one shown before."""

    name: str
    about: str
    same: bool | None
    runs: Sequence[tuple[bool, str]] = ()


@dataclass(frozen=True)
class ShownTranscript:
    """One prompt with its outputs."""

    task: str
    name: str
    about: str
    prompt: str
    versions: Sequence[ShownVersion]


def shown_transcripts(records: Sequence[Transcript]) -> list[ShownTranscript]:
    """Convert transcripts for the page; names have the temperature if there are several."""
    temperatures = len({record.temperature for record in records}) > 1
    return [_shown(record, temperatures) for record in records]


def _shown(record: Transcript, temperatures: bool) -> ShownTranscript:
    turn = f", turn {record.turn + 1}" if record.turn else ""
    temperature = f", {temperature_label(record.temperature)}" if temperatures else ""
    tokens = record.versions[0].tokens
    return ShownTranscript(
        record.task,
        f"{record.prompt_id}{turn}{temperature}",
        f"{tokens} tokens",
        record.prompt,
        _versions(record.versions),
    )


def _versions(versions: Sequence[TranscriptVersion]) -> list[ShownVersion]:
    """Convert the outputs; plain decoding is left out if all others equal it, because theirs mark draft tokens."""
    plain, *others = versions
    found = [_version(each) for each in others]
    if not others or any(each.same is not True for each in others):
        found.insert(0, ShownVersion("plain decoding", f"{plain.tokens} tokens", None, [(False, plain.text)]))
    return found


def _version(version: TranscriptVersion) -> ShownVersion:
    runs = [(origin != TARGET, text) for origin, text in version.runs]
    return ShownVersion(version.variant, f"{version.drafted} of {version.tokens} tokens drafted", version.same, runs)
