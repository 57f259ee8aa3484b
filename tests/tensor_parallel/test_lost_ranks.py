"""A lost rank stops all ranks at once with an error that names it; no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foretell.errors import RankError
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import StepOutput
from foretell.tensor_parallel.leader import LeaderExecutor
from tests.tensor_parallel.sharding import write_folder
from tests.tensor_parallel.world import split
from tests.tiny import VOCAB, add, tiny_decoder

SOON = 60.0  # seconds; less than one on an idle machine
# It polls: a signal just before a blocking read would be handled only after the read.
PROGRAM = """
import pathlib, select, signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from foretell.models.sharding import Shard
from foretell.tensor_parallel import LaunchSpec, ModelShardSpec, TensorParallelGroup
torch.set_num_threads(1)
part = ModelShardSpec(pathlib.Path(sys.argv[1]), torch.float32, None, 64, 4, 128)
team = TensorParallelGroup([LaunchSpec(Shard(1, 2), "cpu", 1, (part,))], torch.device("cpu"))
team.wait_ready()
print(*team.pids, flush=True)
while not select.select([0], [], [], 0.1)[0]:
    pass
"""


def gone(process: int) -> bool:
    """Return whether a process ends soon; a zombie has ended."""
    for _ in range(int(SOON * 20)):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with split(tmp_path, 2) as ranks:
        engine, failures = ranks.engine(), list[RankError]()
        assert engine.runner.workers is not None
        engine.runner.workers.on_failure(failures.append)
        add(engine, "0", [1, 2, 3])
        engine.step()
        os.kill(ranks.team.pids[0], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            for _ in range(100):
                engine.step()
        with pytest.raises(RankError, match="rank 1 of 2"):
            engine.step()
        for _ in range(int(SOON * 20)):  # the callback runs in another thread
            if failures:
                break
            time.sleep(0.05)
        assert [str(error) for error in failures] == [str(ranks.team._workers.failure)]


def test_a_step_whose_rank_is_lost_is_not_committed(tmp_path: Path) -> None:
    """On a CUDA device a step without one of its ranks is aborted, and finishes as if nothing had happened."""
    with split(tmp_path, 2) as ranks:
        engine = ranks.engine()
        (track,) = add(engine, "0", [1, 2, 3])
        engine.step()
        written, lead = list(track.seq.tokens), engine.runner.executor

        def go_on_alone(packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
            os.kill(ranks.team.pids[0], signal.SIGKILL)
            for _ in range(int(SOON * 20)):
                if ranks.team._workers.failure is not None:
                    break
                time.sleep(0.05)
            return StepOutput(torch.zeros(len(packed.logits_indices), VOCAB), None)

        assert isinstance(lead, LeaderExecutor)
        lead.executor.forward = go_on_alone  # type: ignore[method-assign]
        with pytest.raises(RankError, match="was killed by SIGKILL"):
            engine.step()
        assert track.seq.tokens == written


@pytest.mark.slow
def test_the_right_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    with split(tmp_path, 4) as ranks:
        engine = ranks.engine()
        add(engine, "0", [1, 2, 3])
        first, second, third = ranks.team.pids
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 2 of 4 was killed by SIGKILL"):
            for _ in range(100):
                engine.step()
        assert gone(first) and gone(third)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_not_waited_for_long(tmp_path: Path) -> None:
    with split(tmp_path, 2, timeout=1.0) as ranks:
        engine = ranks.engine()
        add(engine, "0", [1, 2, 3])
        os.kill(ranks.team.pids[0], signal.SIGSTOP)
        with pytest.raises(RankError, match="a step failed"):
            engine.step()
        assert gone(ranks.team.pids[0])


@pytest.mark.slow
def test_a_step_that_fails_in_one_rank_ends_all(tmp_path: Path) -> None:
    with split(tmp_path, 2) as ranks:
        engine = ranks.engine()
        add(engine, "0", [1, 2, 3])

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        engine.runner.executor.executor.forward = fail  # type: ignore[attr-defined]
        with pytest.raises(RankError, match="no room"):
            engine.step()
        assert all(gone(process) for process in ranks.team.pids)


@pytest.mark.slow
def test_a_load_error_of_a_rank_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "broken")], capture_output=True, text=True, timeout=120
    )
    assert "RankError: rank 1 of 2 failed" in done.stderr
    assert "broken" in done.stderr


@pytest.mark.parametrize(
    "way", [pytest.param("end", marks=pytest.mark.slow), "SIGINT", pytest.param("SIGKILL", marks=pytest.mark.slow)]
)
def test_no_process_stays(tmp_path: Path, way: str) -> None:
    folder = write_folder(tiny_decoder(), tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None and first.stdin is not None
        other = int(first.stdout.readline())
        if way == "end":
            first.stdin.close()
        elif way == "SIGINT":
            os.killpg(first.pid, signal.SIGINT)  # as a terminal does
        else:
            os.kill(first.pid, signal.SIGKILL)
        first.wait(SOON)
        assert gone(other)


ORPHAN = """
import threading
from foretell.tensor_parallel import worker

class Leaderless:
    def recv(self):
        return None, None, 1.0
    def recv_bytes(self):
        threading.Event().wait()
    def send(self, report):
        raise BrokenPipeError("the leader is gone")

worker.main(Leaderless())
"""


def test_a_worker_without_a_leader_ends_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")
