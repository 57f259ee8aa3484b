"""Prompts and texts as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.bench.transcripts import TextRecord, Version
from foretell.types import TARGET

from ..report import degree


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
