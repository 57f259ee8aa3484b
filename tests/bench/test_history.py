"""Ratios over time: what is kept of a run, and that the file stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.docs_check import ROOT

SCRIPT = ROOT / "bench" / "history.py"
RESULT = {
    "bench": "drafters",
    "version": "0.1.0",
    "model": "m",
    "workload": "own",
    "machine": {"device": "a machine", "threads": 2, "dtype": "float32"},
    "overall": [
        {"arm": "ngram", "temperature": 0.0, "speedup": 1.5, "speedup_interval": [1.4, 1.6], "accepted_per_step": 1.7},
        {"arm": "short", "temperature": 0.0, "speedup": None, "speedup_interval": None, "accepted_per_step": 1.0},
    ],
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A copy of the script, which keeps its history next to it."""
    (folder / "history.py").write_text(SCRIPT.read_text())
    return subprocess.run([sys.executable, str(folder / "history.py"), *arguments], capture_output=True, text=True)


def test_a_run_leaves_a_line_for_each_arm_that_was_timed(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    for ratio in (1.5, 1.2):
        RESULT["overall"][0]["speedup"] = ratio  # type: ignore[index]
        result.write_text(json.dumps(RESULT))
        done = run(tmp_path, str(result), "--commit", "abc", "--date", "2026-11-15")
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["speedup"], line["commit"]) for line in lines] == [
        ("ngram", 1.5, "abc"),
        ("ngram", 1.2, "abc"),
    ]
    assert "| ngram | drafters, own | 1.20 | 1.50 | 2 |" in done.stdout


def test_what_has_no_ratios_is_refused(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text("{}")
    done = run(tmp_path, str(result))
    assert done.returncode == 2 and "has no ratios" in done.stderr and not (tmp_path / "history.jsonl").exists()


def test_the_history_is_whole() -> None:
    lines = [json.loads(line) for line in (ROOT / "bench" / "history.jsonl").read_text().splitlines()]
    assert lines and [line["date"] for line in lines] == sorted(line["date"] for line in lines)
    for line in lines:
        assert line["arm"] and line["commit"] and line["speedup"] > 0 and line["accepted_per_step"] >= 1
        assert line["same_text"] is not False, "another text is a fault, not a figure"
