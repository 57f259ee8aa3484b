"""foretell bench, as it is typed, on a model that loads in a blink."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.engine_backend import EngineBackend
from foretell.bench.measure import PLAIN, MeasureJob, TimedOutput, default_drafters, variants_of
from foretell.bench.prompt import BenchPrompt
from foretell.cli import main as program
from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.llm import LLM
from tests.laws.test_layers import loaded_by

QUICK = ("--rounds", "2", "--max-tokens", "12", "--temperature", "0")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Short enough for the tiny model; the second brings a prediction."""
    fox = "The quick brown fox jumps"
    lines = [
        {"id": "fox", "kind": "copy", "prompt": f"{fox}. {fox}. {fox}", "ignore_eos": True},
        {"id": "sea", "kind": "edit", "prompt": "She sells", "prediction": "sea shells", "ignore_eos": True},
        {"id": "long", "kind": "copy", "prompt": "word " * 200},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = program.main(["bench", *arguments])
    except SystemExit as leaving:
        code = int(str(leaving.code))
    return code, *capsys.readouterr()


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = bench(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_drafters_by_task_as_json(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path
) -> None:
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), *QUICK)
    file = tmp_path / "result.json"
    code, result = reported(capsys, "drafters", *words, "--drafters", "ngram,suffix,prediction", "--out", str(file))
    assert code == 0
    assert json.loads(file.read_text()) == result
    cells = [(cell["task"], cell["arm"]) for cell in result["cells"]]
    assert cells == [("copy", "ngram"), ("copy", "suffix")] + [
        ("edit", variant) for variant in ("ngram", "suffix", "prediction")
    ]
    assert [cell["arm"] for cell in result["overall"]] == ["ngram", "suffix", "prediction"]
    for cell in (*result["cells"], *result["overall"]):
        assert cell["same_text"] is True and cell["speedup"] > 0 and cell["accepted_per_step"] >= 1
        assert cell["speedup_interval"] is None and cell["noise"] > 0, "an interval needs two prompts of each task"
        assert sum(cell["time"].values()) == pytest.approx(1.0)
        assert 0 < cell["time"]["drafting"] < 1 and cell["drafter_failures"] == 0
    assert result["left_out"] == ["long"] and result["complete"] is True
    assert result["drafters"] == {"ngram": 4, "suffix": 4, "prediction": 4}
    assert set(result["machine"]) >= {"device", "threads", "torch", "dtype"}


def test_all_drafters_that_need_no_model_are_the_default(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path
) -> None:
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), "--tasks", "copy", "--quick")
    code, out, err = bench(capsys, "drafters", *words)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("copy ")]
    assert {"ngram", "suffix", "exit:1", "auto"} <= {row[1] for row in rows}
    assert not any(row[1] == "prediction" or row[1].startswith("model:") for row in rows)
    assert "[2/2] done" in err


def test_offline_compares_one_drafter_with_none(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path
) -> None:
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), "--rounds", "1")
    code, result = reported(capsys, "offline", *words, "--max-tokens", "8", "--drafter", "suffix")
    assert code == 0
    assert [cell["arm"] for cell in result["overall"]] == ["suffix"]
    assert result["bench"] == "offline" and result["temperatures"] == [None]


def test_a_different_output_exits_with_one(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EngineBackend.generate

    def wrong(self: EngineBackend, variant: Any, job: MeasureJob) -> TimedOutput:
        from dataclasses import replace

        written = write(self, variant, job)
        return written if variant == PLAIN else replace(written, tokens=(*written.tokens[:-1], 0))

    monkeypatch.setattr(EngineBackend, "generate", wrong)
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), *QUICK)
    code, out, _ = bench(capsys, "drafters", *words, "--drafters", "ngram")
    assert code == 1
    assert "NOT THE SAME TEXT: ngram, copy, T=0: fox, turn 1." in out
    assert all(line.rstrip().endswith("NO") for line in out.splitlines() if line.startswith(("copy ", "edit ")))


def test_ctrl_c_leaves_what_there_is(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, seen = EngineBackend.generate, []

    def stopped(self: EngineBackend, variant: Any, job: MeasureJob) -> TimedOutput:
        seen.append(variant)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return write(self, variant, job)

    monkeypatch.setattr(EngineBackend, "generate", stopped)
    file = tmp_path / "part.json"
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), "--out", str(file), *QUICK)
    code, out, err = bench(capsys, "drafters", *words, "--drafters", "ngram")
    assert code == 130
    part = json.loads(file.read_text())
    assert part["complete"] is False and [cell["task"] for cell in part["cells"]] == ["copy"]
    assert "Stopped early" in out and "foretell: stopped" in err


def test_a_timeout_leaves_what_there_is(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, seen = EngineBackend.generate, []

    def late(self: EngineBackend, variant: Any, job: MeasureJob) -> TimedOutput:
        seen.append(variant)
        if len(seen) == 4:
            signal.raise_signal(signal.SIGTERM)
        return write(self, variant, job)

    monkeypatch.setattr(EngineBackend, "generate", late)
    before = signal.getsignal(signal.SIGTERM)
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), *QUICK)
    code, out, _ = bench(capsys, "offline", *words, "--drafter", "ngram")
    assert code == 130 and "Stopped early" in out and signal.getsignal(signal.SIGTERM) is before
    assert json.loads(out.splitlines()[-1])["complete"] is False


def test_a_grid_has_a_page_and_one_json_line_last(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), *QUICK, "--html", str(page))
    grid = ("--drafter", "ngram,suffix", "--num-speculative-tokens", "auto,3", "--batch", "1,2")
    code, out, _ = bench(capsys, "offline", *words, *grid)
    reported = json.loads(out.splitlines()[-1])
    assert code == 0 and reported["same_text"] is True and reported["complete"] is True
    settings = {(row["arm"], row["batch"]) for row in reported["overall"]}
    names = [f"{drafter}, {length}" for drafter in ("ngram", "suffix") for length in ("adaptive", "3 tokens")]
    assert settings == {(name, batch) for name in names for batch in (1, 2)}
    assert f"HTML report: {page}" in out and "ngram, 3 tokens, batch 2" in page.read_text()


def test_a_terminal_gets_the_table_without_json(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.cli.bench_common.sys.stdout", Terminal(), raising=False)
    words = ("--model", str(tiny_folder), "--workload", "trace", "--data", str(trace), *QUICK)
    code, _, _ = bench(capsys, "offline", *words, "--drafter", "ngram")
    import sys

    assert isinstance(sys.stdout, Terminal)
    printed = sys.stdout.getvalue()
    assert code == 0 and "accepted" in printed and "mean of 2" in printed
    assert "{" not in printed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(LLM, "__init__", load)
    for words, message in [
        (["drafters", "--drafters", "ngarm"], "did you mean 'ngram'"),
        (["drafters", "--drafters", "ngram,none"], "none is what the others are compared with"),
        (["drafters", "--workload", "gsm8k"], "is not shipped"),
        (["drafters", "--tasks", "cod"], "did you mean 'code'"),
        (["drafters", "--temperature", "warm"], "not a list of numbers"),
        (["drafters", "--temperature", "-1"], "temperature"),
        (["drafters", "--rounds", "0"], "rounds: must be 1 or more"),
        (["drafters", "--num-speculative-tokens", "99", "--drafters", "ngram"], "between 0 and 64"),
        (["offline", "--drafter", "none"], "name one that drafts"),
        (["offline", "--out", str(tmp_path)], "is a folder"),
        (["offline", "--html", str(tmp_path / "no" / "page.html")], "there is no folder"),
        (["offline", "--batch", "0"], "batch: must be 1 or more"),
        (["offline", "--num-speculative-tokens", "few"], "such as auto,4,8"),
        (["offline", "--workload", "trace", "--data", str(tmp_path / "none.jsonl")], "there is no"),
        (["synthetic", "--acceptance", "2"], "acceptance: must be between 0 and 1"),
        (["fly"], "'fly' is not known; known: check, compare"),
    ]:
        code, _, err = bench(capsys, *words)
        assert code == 2 and message in err, words
        assert err.count("\n") == 1, "one line"


def test_variants_by_drafter_and_draft_length() -> None:
    base = SpeculationConfig(rule="block")
    names = [
        (variant.name, variant.speculation.drafter, variant.speculation.num_speculative_tokens)
        for variant in variants_of(["ngram", "auto", "ngram+suffix"], [2, 4], base)
    ]
    assert names == [
        ("ngram, 2 tokens", "ngram", 2),
        ("ngram, 4 tokens", "ngram", 4),
        ("auto", "auto", None),
        ("ngram+suffix", "ngram,suffix", None),
    ]
    assert variants_of(["ngram"], [4], base)[0].speculation.rule == "block"
    with pytest.raises(RequestError):
        variants_of(["plain"], [4], base)


def test_default_names_fit_the_model_and_the_workload() -> None:
    kinds = ["ngram", "corpus", "prediction", "model", "exit", "self"]
    plain, edit = [BenchPrompt("a", "chat")], [BenchPrompt("b", "edit", prediction="x")]
    assert default_drafters(kinds, 30, plain) == ["ngram", "exit:15", "self:int8", "self:int4", "auto"]
    assert default_drafters(kinds, 1, edit)[:3] == ["ngram", "prediction", "exit:1"]


def test_a_command_line_that_only_looks_needs_no_torch() -> None:
    modules = "workloads, measure, results, report, run, settings, machine"
    assert not loaded_by(f"from foretell.bench import {modules}; import foretell.cli.bench") & {"torch", "numpy"}
