"""Which arm is taken, and the files that say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.intervals import shown
from foretell.bench.measure import PLAIN, Variant
from foretell.bench.results import TaskCell

from .space import AUTO, DEFAULT_RULE, settings

Standing = Sequence[tuple[Variant, TaskCell]]


@dataclass(frozen=True)
class TuneResult:
    """The arm to serve with, and why."""

    arm: Variant
    cell: TaskCell | None
    words: str


def choose(standing: Standing) -> TuneResult:
    """The first that is surely faster than plain decoding, of those that came farther and are faster first."""
    # A text that differs where it must not is a fault that a bench shows; such an arm is never served.
    able = [(arm, cell) for arm, cell in standing if cell.same_text is not False and cell.speedup is not None]
    for arm, cell in able:
        if cell.speedup_interval is not None and cell.speedup_interval[0] > 1:
            ratio = shown(cell.speedup, cell.speedup_interval)
            return TuneResult(arm, cell, f"{arm.name}: {ratio} times as fast as plain decoding")
    if not able:
        return TuneResult(PLAIN, None, "plain decoding: nothing else was timed to the end; raise --budget")
    best, cell = able[0]
    ratio = shown(cell.speedup, cell.speedup_interval)
    words = f"plain decoding: the best, {best.name}, is not surely faster, {ratio}; a larger --budget may tell"
    return TuneResult(PLAIN, cell, words)


def config_text(verdict: TuneResult, standing: Standing, engine: dict[str, Any], conditions: dict[str, Any]) -> str:
    """YAML for `foretell serve --config`, with what it rests on as comments."""
    import yaml

    machine = conditions.get("machine", {})
    lines = [
        f"# {verdict.words}.",
        f"# Found by foretell tune {conditions.get('version', '')} on {machine.get('device', 'this machine')}, "
        f"workload {conditions.get('workload')}, {conditions.get('seconds', 0):.0f} s"
        + ("." if conditions.get("complete", True) else "; stopped before the end."),
        "# Ratio to plain decoding with a 95% interval, accepted per step, texts:",
    ]
    for arm, cell in standing:
        ratio = shown(cell.speedup, cell.speedup_interval)
        lines.append(f"#   {arm.name}: {ratio}, {cell.accepted_per_step:.2f}, {cell.sequences}")
    found = settings(verdict.arm, engine, conditions.get("rule", DEFAULT_RULE))
    if found.get("rule") == AUTO:
        lines.append("# The rule auto is block for requests without a seed; those with one get the same text as ever.")
    return "\n".join([*lines, yaml.safe_dump(found, sort_keys=False).strip(), ""])


def table(standing: Standing, most: int = 12) -> str:
    """The arms that came farthest, as Markdown."""
    head = "| drafter | ratio to plain | accepted per step | texts | same text |\n| --- | ---: | ---: | ---: | --- |"
    rows = [
        f"| {arm.name} | {shown(cell.speedup, cell.speedup_interval)} | {cell.accepted_per_step:.2f} "
        f"| {cell.sequences} | {'NO' if cell.same_text is False else 'yes' if cell.same_text else 'not promised'} |"
        for arm, cell in standing[:most]
    ]
    return "\n".join([head, *rows])


def beside(config: Path) -> Path:
    """Where the evidence of a config lies."""
    return config.with_suffix(".json") if config.suffix != ".json" else config.with_suffix(".evidence.json")


def evidence_text(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
