"""Training runs from the command line on a tiny model: data to drafter, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foretell.cli.interrupts import deferred_interrupt
from foretell.cli.main import main
from foretell.train.trainer import Trainer
from tests.folder import write_tiny_folder
from tests.waiting import TIMEOUT, wait_for

ROWS = [{"prompt": f"The quick brown fox number {i} jumps over the lazy dog."} for i in range(12)]
FLAGS = ["--max-tokens", "24", "--context", "96", "--draft-vocab", "64", "--held-out", "2", "--long-share", "0.2"]
QUIET = ["--no-measure", "--no-certify", "--batch-tokens", "256", "--long-context", "120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_tiny_folder(folder / "model")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


def command(folder: Path, kind: str, out: str, *more: str) -> list[str]:
    named = ["train", kind, "--target", str(folder / "model"), "--data", str(folder / "data.jsonl")]
    return [*named, "--out", str(folder / out), *FLAGS, *QUIET, *more]


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa", "distill"])
def test_a_run_writes_its_head_and_record(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, kind, kind, "--steps", "21")) == 0
    err = capsys.readouterr().err
    assert "GiB of memory" in err and "tokens per step" in err
    record = json.loads((folder / kind / "run.json").read_text())
    assert record["done"] and record["step"] == 21 and len(record["data"]) == 64
    assert record["settings"]["kind"] == kind and record["curve"]
    assert json.loads((folder / kind / "config.json").read_text())["accuracy"]
    assert (folder / kind / "model.safetensors").is_file()


def test_init_with_a_larger_draft_vocabulary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("eagle", "block"):
        assert main(command(folder, kind, f"few-{kind}", "--steps", "2")) == 0
    more = ["--steps", "1", "--draft-vocab", "80", "--init"]
    assert main(command(folder, "eagle", "more", *more, str(folder / "few-eagle"))) == 0
    few, many = (load_file(folder / name / "model.safetensors") for name in ("few-eagle", "more"))
    assert len(many["draft_ids"]) == 80 and set(few["draft_ids"].tolist()) < set(many["draft_ids"].tolist())
    assert (many["fc.weight"] - few["fc.weight"]).abs().max() < 0.1 * few["fc.weight"].abs().max()
    capsys.readouterr()
    assert main(command(folder, "block", "more-block", *more, str(folder / "few-block"))) != 0
    assert "--draft-vocab" in capsys.readouterr().err  # its Markov head has a row per token


SHAPES = {
    "eagle": ["--layers", "2", "--taps", "1,2"],
    "block": ["--layers", "1", "--draft-tokens", "4", "--markov-rank", "8", "--taps", "2"],
    "medusa": ["--draft-tokens", "2", "--layers", "2"],
    "distill": ["--layers", "2"],
}


@pytest.mark.parametrize("kind", SHAPES)
def test_init_keeps_the_shape_of_the_head(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, then = f"shaped-{kind}", ["--steps", "1", "--init", str(folder / f"shaped-{kind}")]
    assert main(command(folder, kind, first, "--steps", "1", *SHAPES[kind])) == 0
    assert main(command(folder, kind, f"{first}-on", *then)) == 0
    was, now = (json.loads((folder / name / "config.json").read_text()) for name in (first, f"{first}-on"))
    assert {**was, "accuracy": 0} == {**now, "accuracy": 0}
    assert main(command(folder, kind, f"{first}-same", *then, *SHAPES[kind])) == 0
    capsys.readouterr()
    for flag in SHAPES[kind][::2]:
        assert main(command(folder, kind, "refused", *then, flag, "3")) == 2
        err = capsys.readouterr().err
        assert f"{flag[2:].replace('-', '_')}: is 3 but" in err and f"{first} has" in err


def test_init_with_another_kind_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, "medusa", "medusa-head", "--steps", "1")) == 0
    for name, reason in (
        ("medusa-head", "has a medusa head"),
        ("model", "not a foretell-head config"),
        ("nowhere", "no head in"),
    ):
        capsys.readouterr()
        assert main(command(folder, "eagle", "refused", "--steps", "1", "--init", str(folder / name))) != 0
        assert reason in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_init_with_an_older_block_head(folder: Path) -> None:
    """Continue from a head without look-back."""
    from foretell.models.draft_heads.io import make_head, read_head, write_head

    assert main(command(folder, "block", "new", "--steps", "1")) == 0
    config = replace(read_head(folder / "new").config, look_back=0, anchored=False, fc_norm=False)
    head = make_head(config)
    head.init_weights(torch.Generator().manual_seed(0))
    head.draft_ids.copy_(read_head(folder / "new").draft_ids)
    write_head(head, folder / "old")
    assert main(command(folder, "block", "older", "--steps", "1", "--init", str(folder / "old"))) == 0
    assert read_head(folder / "older").config.look_back == 0


def test_speculative_streaming_tunes_the_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.llm import LLM

    assert main(command(folder, "streaming", "streaming", "--steps", "20", "--learning-rate", "1e-3")) == 0
    assert "perplexity" in capsys.readouterr().err
    found = json.loads((folder / "streaming" / "run.json").read_text())["perplexity"]
    assert found["after"] < 1.2 * found["before"]
    tuned, plain = (LLM(folder / name, drafter="none", quiet=True) for name in ("streaming", "model"))
    outputs = [llm.generate(["The quick"])[0].outputs[0].token_ids for llm in (tuned, plain)]
    assert outputs[0] and outputs[1]
    assert (folder / "streaming" / "heads" / "model.safetensors").is_file()


def test_a_killed_run_resumes_exactly(folder: Path) -> None:
    flags = ["--steps", "30", "--save-every", "0.01s"]
    undisturbed = start(command(folder, "eagle", "whole", *flags))
    process = start(command(folder, "eagle", "killed", *flags), slowly=True)
    checkpoint = folder / "killed" / "checkpoint.safetensors"
    wait_for(lambda: checkpoint.is_file() or process.poll() is not None, 2 * TIMEOUT)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.is_file() and not (folder / "killed" / "run.json").is_file(), "it was killed on the way"
    assert start(command(folder, "eagle", "killed", *flags, "--resume")).wait() == undisturbed.wait() == 0
    whole, killed = (load_file(folder / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(whole[name].equal(killed[name]) for name in whole)


def test_ctrl_c_before_the_first_checkpoint_saves_one_and_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--steps", "6", "--save-every", "1h"]
    assert main(command(folder, "medusa", "undisturbed", *flags)) == 0
    step, out = Trainer.step, folder / "interrupted"

    def interrupted(trainer: Trainer) -> None:
        if trainer.state.step == 2:
            signal.raise_signal(signal.SIGINT)
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert main(command(folder, "medusa", "interrupted", *flags)) == 130
    err = capsys.readouterr().err
    assert "stopping after this step" in err
    assert f"checkpoint of step 3 saved; continue with --resume --out {out}" in err
    assert (out / "checkpoint.safetensors").is_file() and not (out / "run.json").exists()
    assert main(command(folder, "medusa", "interrupted", *flags, "--resume")) == 0
    whole, resumed = (load_file(folder / name / "model.safetensors") for name in ("undisturbed", "interrupted"))
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_a_second_ctrl_c_stops_at_once() -> None:
    before, said = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(said.append) as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped() and len(said) == 1
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_keeps_the_answers_generated_so_far(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(count: int, total: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    out = folder / "unanswered"
    with monkeypatch.context() as patch:
        patch.setattr("foretell.cli.train._log_answers", stop)
        assert main(command(folder, "medusa", "unanswered", "--steps", "2")) == 130
    err = capsys.readouterr().err
    assert f"the answers so far are in {out / 'answers.npz'}; continue with --resume --out {out}" in err
    assert main(command(folder, "medusa", "unanswered", "--steps", "2", "--resume")) == 0
    assert "2 of 12 answers reused" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = command(folder, "medusa", "x", "--steps", "2")
    line[line.index("--out") + 1] = "/proc/none/deeper"
    assert main(line) == 2
    err = capsys.readouterr().err
    assert "out: /proc/none/deeper cannot be written" in err and err.count("\n") == 1


# Slow steps: the run is far from done when the test sees its first checkpoint, however busy the machine is.
SLOWLY = """
import sys, time
from foretell.cli.main import main
from foretell.train.trainer import Trainer

step = Trainer.step

def slowly(trainer):
    step(trainer)
    time.sleep(0.5)

Trainer.step = slowly
sys.exit(main())
"""


def start(line: list[str], slowly: bool = False) -> subprocess.Popen[bytes]:
    """Start a new process: the number of threads decides the last bit of sums."""
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    program = ["-c", SLOWLY] if slowly else ["-m", "foretell"]
    return subprocess.Popen([sys.executable, *program, *line], stderr=subprocess.DEVNULL, env=env)


def test_resuming_with_other_settings_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "medusa", "other", "--steps", "2")) == 0
    assert main(command(folder, "medusa", "other", "--steps", "2")) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(command(folder, "medusa", "other", "--steps", "2", "--seed", "1", "--resume")) == 2
    assert "seed: was 0" in capsys.readouterr().err


def test_bad_data_is_refused_before_a_model_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.jsonl").write_text('{"price": 1}\n')
    line = command(folder, "eagle", "bad", "--steps", "2")
    line[line.index("--data") + 1] = str(folder / "bad.jsonl")
    assert main(line) == 2
    assert "usable text" in capsys.readouterr().err


def test_a_servers_log_is_trained_on_without_regeneration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "kind": "chat",
            "request": {"messages": [{"role": "user", "content": f"Say {i}."}]},
            "answers": [{"token_ids": [5 + i, 6, 7, 8, 9, 10, 11]}],
        }
        for i in range(8)
    ]
    (folder / "log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    line = command(folder, "medusa", "logged", "--steps", "2")
    at = line.index("--data")
    assert main([*line[:at], "--from-log", str(folder / "log.jsonl"), *line[at + 2 :]]) == 0
    assert "answers generated" not in capsys.readouterr().err
    assert json.loads((folder / "logged" / "run.json").read_text())["learnt_tokens"] == 7 * 7


@pytest.mark.parametrize("kind", ["eagle", "distill", "streaming"])
def test_checkpoints_are_selected_in_the_engine(kind: str, folder: Path) -> None:
    line = [word for word in command(folder, kind, f"measured-{kind}", "--steps", "4") if word != "--no-measure"]
    assert main([*line, "--check-every", "0.01s"]) == 0
    record = json.loads((folder / f"measured-{kind}" / "run.json").read_text())
    assert record["engine"]["accepted_per_step"] >= 1 and record["best"] >= 1


@pytest.mark.slow
def test_the_result_is_certified(folder: Path) -> None:
    line = [word for word in command(folder, "eagle", "certified", "--steps", "4") if word not in QUIET[:2]]
    code = main(line)
    record = json.loads((folder / "certified" / "run.json").read_text())
    assert code == {True: 0, None: 4}[record["lossless"]], "after four steps too few draft tokens may be accepted"
    assert all(each["rejected"] > 0 for each in record["certificate"]["settings"])
