"""The command `foretell tune` on a tiny model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretell.bench.engine_backend import EngineBackend
from foretell.bench.measure import MeasureJob, TimedOutput
from foretell.cli import serve
from foretell.cli.main import main
from foretell.cli.tune import seconds
from foretell.llm import LLM


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return requests short enough for the tiny model, with many repeated n-grams."""
    fox = "The quick brown fox jumps"
    lines = [
        {"id": f"fox {i}", "prompt": f"{fox}. {fox}. {fox} {i}", "max_tokens": 12, "ignore_eos": True} for i in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tune(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["tune", *arguments])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    return code, *capsys.readouterr()


def arguments_for(folder: Path, trace: Path, out: Path) -> list[str]:
    drafters = ("--drafters", "ngram,suffix,self:int4", "--num-speculative-tokens", "2")
    return ["--model", str(folder), "--trace", str(trace), "--budget", "5s", "--out", str(out), *drafters]


def serve_config(path: Path) -> Any:
    """Return the settings that `foretell serve` reads from a config."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.settings(parser.parse_args(["--config", str(path)]))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.cli.tune.MIN_BUDGET", 0.2)


def test_it_writes_a_config_for_serve_and_its_evidence(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path, quick: None
) -> None:
    out = tmp_path / "tuned.yaml"
    line = arguments_for(tiny_folder, trace, out)
    line[line.index("5s")] = "1s"
    code, printed, err = tune(capsys, *line, "--json")
    assert code == 0, err
    found = json.loads(printed)
    assert found == json.loads(out.with_suffix(".json").read_text())
    assert found["complete"] is True and found["model"] == str(tiny_folder) and found["no_memory_for"] == []
    names = {variant["arm"] for variant in found["arms"]}
    assert names == {f"{name}, {how}" for name in ("ngram", "suffix", "self:int4") for how in ("adapting", "2 tokens")}
    assert all(variant["same_text"] is True and variant["accepted_per_step"] >= 1 for variant in found["arms"])
    _, engine, speculation, _ = serve_config(out)
    assert engine.model == str(tiny_folder)
    chosen = next((variant for variant in found["arms"] if variant["arm"] == found["tune"]), None)
    assert speculation.drafter == (chosen["drafter"] if chosen else "none")
    assert speculation.num_speculative_tokens == (chosen["num_speculative_tokens"] if chosen else None)
    text = out.read_text()
    assert text.startswith("# ") and all(f"#   {name}: " in text for name in names)
    assert yaml.safe_load(text)["model"] == str(tiny_folder)
    assert "prompts" in err and f"foretell serve --config {out}" in err


def test_ctrl_c_leaves_a_config(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, seen = EngineBackend.generate, []

    def stopped(self: EngineBackend, variant: Any, job: MeasureJob) -> TimedOutput:
        seen.append(variant)
        if len(seen) == 17:  # in the third prompt
            raise KeyboardInterrupt
        return write(self, variant, job)

    monkeypatch.setattr(EngineBackend, "generate", stopped)
    out = tmp_path / "part.yaml"
    code, printed, err = tune(capsys, *arguments_for(tiny_folder, trace, out))
    assert code == 130 and "Interrupted: these are the results so far" in printed and "foretell: stopped" in err
    part = json.loads(out.with_suffix(".json").read_text())
    assert part["complete"] is False and len(part["arms"]) == 6
    assert "interrupted" in out.read_text() and serve_config(out)


def test_ctrl_c_before_the_first_result_writes_nothing(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: EngineBackend, variant: Any, job: MeasureJob) -> TimedOutput:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineBackend, "generate", stopped)
    out = tmp_path / "tuned.yaml"
    out.write_text("model: kept\n")
    code, printed, err = tune(capsys, *arguments_for(tiny_folder, trace, out))
    assert code == 130 and not printed
    assert "no variant was measured before the end; nothing was written" in err
    assert out.read_text() == "model: kept\n" and not out.with_suffix(".json").exists()


def test_drafters_without_memory_are_reported(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, trace: Path, tmp_path: Path, quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from foretell.build.model_source import ModelSource

    monkeypatch.setattr(ModelSource, "copy_bytes", lambda self, bits: 1 << 60)
    out = tmp_path / "tuned.yaml"
    line = arguments_for(tiny_folder, trace, out)
    line[line.index("5s")] = "0.3s"
    code, printed, _ = tune(capsys, *line)
    assert code == 0 and "do not fit in memory: self:int4" in printed
    assert not any("self" in variant["arm"] for variant in json.loads(out.with_suffix(".json").read_text())["arms"])


def test_bad_input_is_rejected_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(LLM, "__init__", load)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    model = ["--model", str(tiny_folder)]
    for line, message in [
        (["--trace", "none.jsonl"], "there is no none.jsonl"),
        (["--trace", str(empty)], "is empty; put one JSON object on each line"),
        (["--trace", str(empty), "--workload", "own"], "leave out --workload"),
        (["--workload", "owm"], "did you mean 'own'"),
        (["--workload", "gsm8k"], "is not shipped"),
        (["--budget", "soon"], "is not a duration such as 90s, 5m or 1h"),
        (["--budget", "1s"], "budget: must be 5 seconds or more"),
        (["--out", str(tmp_path)], "is a folder"),
        (["--max-tokens", "0"], "max_tokens"),
        ([*model, "--drafters", "ngarm"], "did you mean 'ngram'"),
        ([*model, "--drafters", "none"], "leave it out"),
        (["--num-speculative-tokens", "two"], "not a list of integers"),
    ]:
        code, _, err = tune(capsys, *line)
        assert code == 2 and message in err, (line, err)
        assert err.count("\n") == 1, "one line"


def test_durations_are_parsed() -> None:
    assert [seconds(text) for text in ("90", "90s", "5m", "1.5h")] == [90, 90, 300, 5400]
