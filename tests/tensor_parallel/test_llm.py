"""`tensor_parallel_size` as users give it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.errors import ForetellError, RankError, RequestError
from foretell.tensor_parallel.tp_group import check_devices
from tests.folder import write_tiny_folder
from tests.server.process import ServerProcess
from tests.tensor_parallel.test_lost_ranks import gone

PROMPTS = ["The quick brown fox", "She sells", "the the the"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
WAIT = 20.0


def texts(llm: LLM, **choice: object) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, speculation=SpeculationChoice(**choice))  # type: ignore[arg-type]
    return [output.outputs[0].token_ids for output in outputs]


def test_a_sharded_model_generates_the_same_output(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = LLM(tiny_folder, drafter="ngram", kv_memory=0.01, quiet=True)
    with LLM(tiny_folder, drafter=f"model:{tiny_folder},ngram", kv_memory=0.01, tensor_parallel_size=2) as llm:
        assert "2 ranks hold" in capsys.readouterr().err
        plain = texts(llm, enabled=False)
        assert plain == texts(whole, enabled=False)
        assert texts(llm) == texts(llm, drafter="ngram") == plain
        (process,) = llm.assembly.workers.pids  # type: ignore[union-attr]
    assert gone(process)
    with pytest.raises(RankError, match="were stopped"):
        texts(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 5}, "use 4 or fewer"),
        ({"tensor_parallel_size": 0}, "must be 1 or more"),
        ({"tensor_parallel_size": 2, "drafter": "exit:1"}, "sharded over 2 ranks; use another drafter"),
        ({"tensor_parallel_size": 2, "drafter": "ngram,self:int8"}, "self:int8 runs the target's own layers"),
        ({"tensor_parallel_size": 2, "drafter": "ngram+self:int8"}, "self:int8 runs the target's own layers"),
        ({"tensor_parallel_size": 2, "drafter": "exit:1 + ngram"}, "exit:1 runs the target's own layers"),
        ({"draft_tensor_parallel_size": 2}, "the target is not sharded"),
        ({"tensor_parallel_size": 4, "draft_tensor_parallel_size": 2}, "or 4, as for the target"),
        ({"tensor_parallel_size": 2, "draft_tensor_parallel_size": 2, "draft_device": "cpu"}, "that is not sharded"),
        ({"draft_device": "tpu", "drafter": "model:smollm2-135m"}, "draft_device: 'tpu' is not known"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(
    options: dict[str, object], words: str, tiny_folder: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        LLM(tiny_folder, quiet=True, **options)


def test_ranks_take_the_devices_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(torch.device("cuda"), 2)
    check_devices(torch.device("cuda:0"), 2)
    with pytest.raises(RequestError, match="device: 2 ranks run on cuda:0 to cuda:1; use cuda instead of cuda:1"):
        check_devices(torch.device("cuda:1"), 2)
    with pytest.raises(RequestError, match="3 ranks need a CUDA device each; there are 2"):
        check_devices(torch.device("cuda"), 3)


def test_a_draft_model_on_a_device_of_its_own(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", draft_device="cpu", kv_memory=0.01, quiet=True)
    assert texts(llm) == texts(llm, enabled=False)


@pytest.mark.slow
def test_a_draft_model_sharded_like_the_target(tiny_folder: Path) -> None:
    options = {"drafter": f"model:{tiny_folder}", "kv_memory": 0.01, "quiet": True}
    with LLM(tiny_folder, tensor_parallel_size=2, draft_tensor_parallel_size=2, **options) as llm:  # type: ignore[arg-type]
        plain = texts(llm, enabled=False)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert sum(output.speculation.accepted for output in outputs) > 0, "the draft is the model itself"


@pytest.mark.slow
def test_an_engine_that_is_dropped_leaves_no_process(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, drafter="ngram", kv_memory=0.01, tensor_parallel_size=2, quiet=True)
    (process,) = llm.assembly.workers.pids  # type: ignore[union-attr]
    del llm
    gc.collect()
    assert gone(process)


@pytest.mark.slow
def test_a_failed_start_leaves_no_process(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def fail(runner: object, team: object) -> None:
        started.extend(team.pids)  # type: ignore[attr-defined]
        raise ForetellError("planted")

    monkeypatch.setattr("foretell.build.engine_builder.make_leader", fail)
    with pytest.raises(ForetellError, match="planted"):
        LLM(tiny_folder, drafter="ngram", kv_memory=0.01, tensor_parallel_size=2, quiet=True)
    assert started and all(gone(process) for process in started)


@pytest.mark.slow
def test_int8_shards_generate_the_same_with_and_without_a_draft(tiny_folder: Path) -> None:
    options = {"drafter": f"model:{tiny_folder},ngram", "kv_memory": 0.01, "quantization": "int8", "quiet": True}
    with LLM(tiny_folder, tensor_parallel_size=3, **options) as llm:
        assert texts(llm) == texts(llm, drafter="ngram") == texts(llm, enabled=False)


@pytest.mark.slow
def test_the_command_line(tiny_folder: Path) -> None:
    words = ["generate", "The quick brown fox", "--model", str(tiny_folder), "--temperature", "0", "--json"]
    words += ["--kv-memory", "0.01", "--max-tokens", "16"]
    found = []
    for extra in ([], ["--tensor-parallel-size", "2"]):
        done = subprocess.run(
            [sys.executable, "-m", "foretell", *words, *extra], capture_output=True, text=True, timeout=120, check=True
        )
        found.append(json.loads(done.stdout)["text"])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_server_reports_a_killed_rank(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    with ServerProcess(folder, "--tensor-parallel-size", "2", "--drafter", "ngram") as server:
        server.post("/v1/completions", prompt="The quick", max_tokens=8)
        (rank,) = children(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        for _ in range(int(WAIT * 10)):  # while it is idle
            if server.http.get("/health").status_code == 503:
                break
            time.sleep(0.1)
        reply = server.post("/v1/completions", status=503, prompt="The quick", max_tokens=8)
        assert "rank 1 of 2 was killed by SIGKILL" in json.dumps(reply)


def children(process: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(status.parent.name))
    return found
