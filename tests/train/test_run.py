"""A run from the command line, over a tiny model in a folder: data to drafter, killed and gone on with."""

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

from foretell.cli.main import main
from tests.folder import write_tiny_folder
from tests.waiting import TIMEOUT, wait_for

ASKS = [{"prompt": f"The quick brown fox number {i} jumps over the lazy dog."} for i in range(12)]
FLAGS = ["--max-tokens", "24", "--context", "96", "--draft-vocab", "64", "--held-out", "2", "--long-share", "0.2"]
QUIET = ["--no-measure", "--no-certify", "--batch-tokens", "256", "--long-context", "120"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_tiny_folder(folder / "model")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ASKS))
    return folder


def words(place: Path, kind: str, out: str, *more: str) -> list[str]:
    named = ["train", kind, "--target", str(place / "model"), "--data", str(place / "data.jsonl")]
    return [*named, "--out", str(place / out), *FLAGS, *QUIET, *more]


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa", "distill"])
def test_a_run_writes_what_it_says(kind: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(place, kind, kind, "--steps", "21")) == 0
    said = capsys.readouterr().err
    assert "GiB of memory" in said and "tokens a step" in said
    record = json.loads((place / kind / "run.json").read_text())
    assert record["done"] and record["step"] == 21 and len(record["data"]) == 64
    assert record["settings"]["kind"] == kind and record["curve"]
    assert json.loads((place / kind / "config.json").read_text())["accuracy"]
    assert (place / kind / "model.safetensors").is_file()


def test_a_head_goes_on_with_more_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("eagle", "block"):
        assert main(words(place, kind, f"few-{kind}", "--steps", "2")) == 0
    more = ["--steps", "1", "--draft-vocab", "80", "--init"]
    assert main(words(place, "eagle", "more", *more, str(place / "few-eagle"))) == 0
    few, many = (load_file(place / name / "model.safetensors") for name in ("few-eagle", "more"))
    assert len(many["draft_ids"]) == 80 and set(few["draft_ids"].tolist()) < set(many["draft_ids"].tolist())
    assert (many["fc.weight"] - few["fc.weight"]).abs().max() < 0.1 * few["fc.weight"].abs().max()
    capsys.readouterr()
    assert main(words(place, "block", "more-block", *more, str(place / "few-block"))) != 0
    assert "--draft-vocab" in capsys.readouterr().err  # its Markov head has a row for each word


SHAPES = {
    "eagle": ["--layers", "2", "--taps", "1,2"],
    "block": ["--layers", "1", "--draft-tokens", "4", "--markov-rank", "8", "--taps", "2"],
    "medusa": ["--draft-tokens", "2", "--layers", "2"],
    "distill": ["--layers", "2"],
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_head_goes_on_in_its_shape(kind: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, then = f"shaped-{kind}", ["--steps", "1", "--init", str(place / f"shaped-{kind}")]
    assert main(words(place, kind, first, "--steps", "1", *SHAPES[kind])) == 0
    assert main(words(place, kind, f"{first}-on", *then)) == 0
    was, now = (json.loads((place / name / "config.json").read_text()) for name in (first, f"{first}-on"))
    assert {**was, "accuracy": 0} == {**now, "accuracy": 0}
    assert main(words(place, kind, f"{first}-same", *then, *SHAPES[kind])) == 0
    capsys.readouterr()
    for flag in SHAPES[kind][::2]:
        assert main(words(place, kind, "refused", *then, flag, "3")) == 2
        said = capsys.readouterr().err
        assert f"{flag[2:].replace('-', '_')}: 3 is asked for" in said and f"{first} has" in said


def test_what_is_no_head_of_the_kind_is_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(place, "medusa", "medusa-head", "--steps", "1")) == 0
    for folder, told in (("medusa-head", "kind medusa"), ("model", "not a head"), ("nowhere", "no head in")):
        capsys.readouterr()
        assert main(words(place, "eagle", "refused", "--steps", "1", "--init", str(place / folder))) != 0
        assert told in capsys.readouterr().err
    assert not (place / "refused").exists()


def test_an_older_block_head_goes_on_as_it_is(place: Path) -> None:
    """One that does not look back, as those of others do not."""
    from foretell.models.draft_heads.io import make_head, read_head, write_head

    assert main(words(place, "block", "new", "--steps", "1")) == 0
    said = replace(read_head(place / "new").config, look_back=0, anchored=False, fc_norm=False)
    head = make_head(said)
    head.init_weights(torch.Generator().manual_seed(0))
    head.draft_ids.copy_(read_head(place / "new").draft_ids)
    write_head(head, place / "old")
    assert main(words(place, "block", "older", "--steps", "1", "--init", str(place / "old"))) == 0
    assert read_head(place / "older").config.look_back == 0


def test_a_target_learns_to_foretell_by_itself(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.llm import LLM

    assert main(words(place, "streaming", "streaming", "--steps", "20", "--learning-rate", "1e-3")) == 0
    assert "perplexity" in capsys.readouterr().err
    found = json.loads((place / "streaming" / "run.json").read_text())["perplexity"]
    assert found["after"] < 1.2 * found["before"]
    tuned, plain = (LLM(place / name, drafter="none", quiet=True) for name in ("streaming", "model"))
    texts = [llm.generate(["The quick"])[0].outputs[0].token_ids for llm in (tuned, plain)]
    assert texts[0] and texts[1]
    assert (place / "streaming" / "heads" / "model.safetensors").is_file()


def test_a_killed_run_goes_on_as_if_it_had_not_been(place: Path) -> None:
    flags = ["--steps", "30", "--save-every", "0.01s"]
    undisturbed = start(words(place, "eagle", "whole", *flags))
    process = start(words(place, "eagle", "killed", *flags), slowly=True)
    checkpoint = place / "killed" / "checkpoint.safetensors"
    wait_for(lambda: checkpoint.is_file() or process.poll() is not None, 2 * TIMEOUT)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.is_file() and not (place / "killed" / "run.json").is_file(), "it was killed on the way"
    assert start(words(place, "eagle", "killed", *flags, "--resume")).wait() == undisturbed.wait() == 0
    whole, killed = (load_file(place / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(whole[name].equal(killed[name]) for name in whole)


# Whoever looks for its first checkpoint finds a run that has far to go, however busy the machine is.
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
    """A process of its own: how many threads add up decides the last bit."""
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    program = ["-c", SLOWLY] if slowly else ["-m", "foretell"]
    return subprocess.Popen([sys.executable, *program, *line], stderr=subprocess.DEVNULL, env=env)


def test_going_on_with_other_settings_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(place, "medusa", "other", "--steps", "2")) == 0
    assert main(words(place, "medusa", "other", "--steps", "2")) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(words(place, "medusa", "other", "--steps", "2", "--seed", "1", "--resume")) == 2
    assert "seed: was 0" in capsys.readouterr().err


def test_bad_data_is_refused_before_a_model_is_loaded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.jsonl").write_text('{"price": 1}\n')
    line = words(place, "eagle", "bad", "--steps", "2")
    line[line.index("--data") + 1] = str(place / "bad.jsonl")
    assert main(line) == 2
    assert "usable text" in capsys.readouterr().err


def test_a_servers_log_is_trained_on_as_it_stands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "kind": "chat",
            "request": {"messages": [{"role": "user", "content": f"Say {i}."}]},
            "answers": [{"token_ids": [5 + i, 6, 7, 8, 9, 10, 11]}],
        }
        for i in range(8)
    ]
    (place / "log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    line = words(place, "medusa", "logged", "--steps", "2")
    at = line.index("--data")
    assert main([*line[:at], "--from-log", str(place / "log.jsonl"), *line[at + 2 :]]) == 0
    assert "answers written" not in capsys.readouterr().err
    assert json.loads((place / "logged" / "run.json").read_text())["learnt_tokens"] == 7 * 7


@pytest.mark.parametrize("kind", ["eagle", "distill", "streaming"])
def test_checkpoints_are_chosen_through_the_engine(kind: str, place: Path) -> None:
    line = [word for word in words(place, kind, f"measured-{kind}", "--steps", "4") if word != "--no-measure"]
    assert main([*line, "--check-every", "0.01s"]) == 0
    record = json.loads((place / f"measured-{kind}" / "run.json").read_text())
    assert record["engine"]["accepted_per_step"] >= 1 and record["best"] >= 1


@pytest.mark.slow
def test_the_result_is_certified(place: Path) -> None:
    line = [word for word in words(place, "eagle", "certified", "--steps", "4") if word not in QUIET[:2]]
    code = main(line)
    record = json.loads((place / "certified" / "run.json").read_text())
    assert code == {True: 0, None: 4}[record["lossless"]], "after four steps too few draft tokens may be accepted"
    assert all(each["rejected"] > 0 for each in record["certificate"]["settings"])
