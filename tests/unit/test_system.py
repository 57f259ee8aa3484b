"""CPU cores and threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from foretell.build.resolve import set_threads
from foretell.utils.system import usable_cores


def machine(folder: Path, siblings: list[str], quota: str = "") -> Path:
    for cpu, others in enumerate(siblings):
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(others + "\n")
    if quota:
        (folder / "fs/cgroup").mkdir(parents=True)
        (folder / "fs/cgroup/cpu.max").write_text(quota + "\n")
    return folder


@pytest.mark.parametrize(
    ("siblings", "quota", "cores"),
    [
        (["0", "1", "2", "3"], "", 4),
        (["0-1", "0-1", "2-3", "2-3"], "", 2),
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0", "1", "2", "3"], "150000 100000", 2),
        (["0", "1", "2", "3"], "20000 100000", 1),
        ([], "", 4),
    ],
    ids=["one thread per core", "two threads per core", "no quota", "a quota", "a part of a core", "unknown topology"],
)
def test_cores_are_counted(
    siblings: list[str], quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert usable_cores(machine(tmp_path, siblings, quota)) == cores


def test_threads_default_to_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr("foretell.build.resolve.usable_cores", lambda: before + 3)
    set_threads(None)
    assert not calls, "no more than torch has already"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("foretell.build.resolve.usable_cores", lambda: 4)
    set_threads(5)
    set_threads(None)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    set_threads(None)
    assert calls == [5, 4]
