"""Keeps ratios over time: python bench/history.py RESULT.json [--commit HASH] [--date 2026-11-15] [--note WORDS]

Takes the JSON of `foretell bench offline`, `drafters` or `never-slower` (or of `foretell tune`) and appends a line for
each arm to `bench/history.jsonl`: when, which commit and machine, the ratio with its interval, accepted per step.
Without a file it prints the last line of each variant next to its best one on the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent / "history.jsonl"


def lines_of(result: dict[str, Any], when: str, commit: str, note: str = "") -> Iterator[dict[str, Any]]:
    """A line for each arm over all tasks."""
    machine = result.get("machine", {})
    for cell in result.get("overall") or result.get("arms") or []:
        if cell.get("speedup") is None:
            continue
        yield {
            "date": when,
            "commit": commit,
            "version": result.get("version", ""),
            "bench": result.get("bench", "tune"),
            "model": result.get("model", ""),
            "workload": result.get("workload", "own"),
            "machine": ", ".join(str(machine.get(name, "?")) for name in ("device", "threads", "dtype")),
            "arm": cell.get("arm") or cell.get("drafter"),
            "temperature": cell.get("temperature"),
            "batch": cell.get("batch", 1),
            "speedup": round(cell["speedup"], 4),
            "speedup_interval": cell.get("speedup_interval"),
            "accepted_per_step": round(cell["accepted_per_step"], 4),
            "same_text": cell.get("same_text"),
            "note": note,
        }


def append(lines: list[dict[str, Any]], path: Path = HISTORY) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read(path: Path = HISTORY) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def summary(history: list[dict[str, Any]]) -> str:
    """The last ratio of each arm, and the best it had."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in history:
        key = tuple(line.get(name) for name in ("arm", "bench", "workload", "model", "temperature", "batch", "machine"))
        groups.setdefault(key, []).append(line)
    rows = ["| arm | bench | last | best | runs |", "| --- | --- | ---: | ---: | ---: |"]
    for (arm, bench, workload, *_), lines in groups.items():
        best = max(line["speedup"] for line in lines)
        rows.append(f"| {arm} | {bench}, {workload} | {lines[-1]['speedup']:.2f} | {best:.2f} | {len(lines)} |")
    return "\n".join(rows)


def this_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HISTORY.parent)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", nargs="?", type=Path, help="the JSON of a run")
    parser.add_argument("--commit", help="what was measured (default: the checkout's)")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--note", default="", help="what a reader should know")
    given = parser.parse_args()
    if given.result is not None:
        result = json.loads(given.result.read_text(encoding="utf-8"))
        found = list(lines_of(result, given.date, given.commit or this_commit(), given.note))
        if not found:
            print(f"{given.result} has no ratios; give the JSON of foretell bench offline or drafters", file=sys.stderr)
            return 2
        append(found)
    print(summary(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
