"""Two ranks over NCCL, with all-reduces in CUDA graphs. They share a device: NCCL_HOSTID makes them two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.errors import RankError
from foretell.tensor_parallel import tp_group as module
from foretell.tensor_parallel.collectives import ProcessGroup
from tests.tensor_parallel.world import Split, SplitHead, split
from tests.tiny import HEADS, add, generate, model_drafter, tree_around

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SERVED = {name: HEADS[name] for name in ("eagle", "mtp", "block", "medusa")}
SAMPLING: dict[str, dict[str, object]] = {"greedy": {}, "sampled": {"temperature": 1.0}}
DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "ngram": lambda truth: NGramDrafter(1, 3),
    "model": lambda truth: model_drafter(seed=5, device="cuda"),
    **{name: lambda truth, name=name: SplitHead(name) for name in SERVED},  # type: ignore[misc]
    "tree around the text": tree_around,
}
SOON = 20.0  # seconds


class Elsewhere(ProcessGroup):
    """NCCL refuses two ranks of one machine on one device."""

    def __init__(self, *given: Any) -> None:
        os.environ["NCCL_HOSTID"] = "first"  # the worker has started with another one
        super().__init__(*given)


@contextmanager
def on_two_machines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOSTID", "second")
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        patch.setattr(module, "ProcessGroup", Elsewhere)
        yield


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("models") / "split"
    with on_two_machines(), split(folder, 2, device="cuda:0", heads=SERVED) as found:
        yield found


@pytest.fixture(scope="module")
def plain(ranks: Split) -> dict[str, list[list[int]]]:
    return {name: ranks.generate(**params) for name, params in SAMPLING.items()}  # type: ignore[arg-type]


def test_the_output_is_that_of_one_process(plain: dict[str, list[list[int]]]) -> None:
    for name, params in SAMPLING.items():
        assert plain[name] == generate(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_does_not_change_the_output(
    ranks: Split, plain: dict[str, list[list[int]]], drafter: str, sampling: str
) -> None:
    truth = plain[sampling]
    assert ranks.generate(DRAFTERS[drafter](truth), **SAMPLING[sampling]) == truth  # type: ignore[arg-type]


def test_all_reduces_are_in_the_graphs(ranks: Split) -> None:
    engine = ranks.engine()
    add(engine, "0", [1, 2, 3])
    while engine.busy:
        engine.step()
    recorder = engine.runner.executor.executor.graph_cache(engine.runner.hidden_layers)  # type: ignore[attr-defined]
    assert any(recording is not None for recording in recorder.graphs.values())


def test_a_killed_rank_is_reported_and_its_step_is_not_committed() -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.gpu.test_ranks"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        try:
            found = json.loads(first.stdout.readline())
            assert first.wait(SOON) == 0, "it exits by itself"
        finally:
            first.kill()
    assert "was killed by SIGKILL" in found["error"] and found["seconds"] < SOON
    assert 6 <= len(found["written"]) < len(found["truth"])
    assert found["written"] == found["truth"][: len(found["written"])]


def lose(folder: Path) -> dict[str, Any]:
    """Return what became of a request whose second rank is killed meanwhile."""
    truth, began = generate(prompts=[[1, 2, 3]])[0], 0.0
    with split(folder, 2, device="cuda:0") as lost:
        engine = lost.engine()
        (track,) = add(engine, "0", [1, 2, 3])
        try:
            for step in range(100):
                if step == 6:
                    os.kill(lost.team.pids[0], signal.SIGKILL)
                    began = time.monotonic()
                engine.step()
        except RankError as error:
            found = {"error": str(error), "seconds": time.monotonic() - began}
            return found | {"written": track.seq.tokens[3:], "truth": truth}
    raise AssertionError("no rank was lost")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, on_two_machines():
        print(json.dumps(lose(Path(place))), flush=True)
