"""Tables in pages are those of stored runs."""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs_check import ROOT


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "bench" / "readme_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_show_what_the_stored_runs_give(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_the_readme_shows_a_run(script: ModuleType) -> None:
    assert [found["run"] for found in script.PLACE.finditer((ROOT / "README.md").read_text())]


@pytest.fixture
def elsewhere(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one page and one run."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    cell = {"task": "code", "arm": "auto", "temperature": 0.0, "batch": 1, "tasks": 1, "tokens_per_second": 20.0}
    cell |= {"plain_tokens_per_second": 10.0, "speedup": 2.0, "speedup_interval": [1.5, 2.5]}
    cell |= {"accepted_per_step": 2.25, "same_text": True}
    run = {"bench": "offline", "date": "2026-01-01", "model": "m", "weights": "int8", "max_tokens": None, "rounds": 3}
    run |= {"machine": {"device": "a cpu", "cores": 2}, "cells": [cell], "overall": [{**cell, "task": "all"}]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- run run.json -->\nold\n<!-- end of run -->\nafter\n")
    return page


def test_a_page_is_written_and_then_left_alone(script: ModuleType, elsewhere: Path) -> None:
    assert script.main(["--check"]) == 1
    assert "old" in elsewhere.read_text(), "a check writes nothing"
    assert script.main([]) == 0
    text = elsewhere.read_text()
    assert text.startswith("before\n<!-- run run.json -->\n| task |") and text.endswith("<!-- end of run -->\nafter\n")
    assert "| code | 10 | 20 | 2.00 (1.50 to 2.50) | 2.25 | yes |" in text and "| mean of 1 |" in text
    assert "Measured 2026-01-01: m (int8); a cpu, 2 cores; each prompt's own limit; 3 rounds" in text
    assert script.main(["--check"]) == 0
    elsewhere.write_text(text.replace("2.25", "3.25"))
    assert script.main(["run.json", "--check"]) == 1


def test_a_short_table_has_the_extremes_and_the_mean(script: ModuleType, elsewhere: Path) -> None:
    elsewhere.write_text("<!-- run run.json short -->\n<!-- end of run -->\n")
    assert script.main([]) == 0
    rows = [line for line in elsewhere.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| code (least)", "| code (most)", "| mean of 1 tasks"]
    assert rows[2].endswith("| 10 | 20 | 2.00 (1.50 to 2.50) |")


def test_what_is_missing_is_reported(script: ModuleType, elsewhere: Path) -> None:
    with pytest.raises(SystemExit, match="no page shows other.json"):
        script.main(["other.json"])
    elsewhere.write_text("<!-- run none.json -->\n<!-- end of run -->\n")
    with pytest.raises(SystemExit, match="there is no none.json; write it with"):
        script.main([])


def test_the_short_table_of_peers_keeps_the_fastest_of_each_kind_of_draft(script: ModuleType) -> None:
    speeds = {"llama.cpp Q8_0": 30, "llama.cpp Q8_0 n-gram": 33, "llama.cpp Q8_0 draft model": 19}
    speeds |= {"llama.cpp Q4_0 n-gram": 34, "llama.cpp Q4_0 draft model": 18, "llama.cpp F32 n-gram": 9}
    speeds |= {"foretell int8": 44, "foretell int8 suffix+recycle+draft model": 93}
    run = {"tokens_per_second": {name: {"geometric_mean": value} for name, value in speeds.items()}, "reading": {}}
    names = [row.split(" | ")[0].removeprefix("| ") for row in script.short_peers_table(run)[2:]]
    assert names == [
        "llama.cpp Q4_0 n-gram",
        "llama.cpp Q8_0",
        "llama.cpp Q8_0 draft model",
        "foretell int8",
        "foretell int8 suffix+recycle+draft model",
    ]


@pytest.mark.parametrize(("draft", "label"), [(None, "auto"), ("folder", "suffix+recycle+draft model")])
def test_peers_names_our_drafts_as_what_it_starts(draft: str | None, label: str, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    peers, models = importlib.import_module("peers"), importlib.import_module("peer_models")
    started: list[list[str]] = []
    monkeypatch.setattr(peers, "server", lambda command, *_: nullcontext(started.append(command)))
    ways = peers.Ways({}, {}, {}, {})
    subject = models.Subject(Path("m.gguf"), (), ("int8",), draft, draft)
    with ExitStack() as stack:
        peers.add_ours(ways, 96, subject, stack, iter(range(9)))
    assert list(ways.one) == ["foretell int8", f"foretell int8 {label}"]
    assert ways.plain == {f"foretell int8 {label}": "foretell int8"}
    drafter = [word for word in started[0] if "recycle" in word]
    assert drafter == ([] if draft is None else ["suffix,recycle,model:folder"])


def test_a_stored_run_with_a_draft_model_is_not_called_auto() -> None:
    run = json.loads((ROOT / "bench" / "runs" / "peers-1.1b.json").read_text())
    assert not [name for name in run["tokens_per_second"] if name.endswith(" auto")]
