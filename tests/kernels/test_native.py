"""The library is built once, whole, by whoever comes first, and done without where it cannot be had."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretell.kernels.native import build
from foretell.kernels.native.library import library
from tests.waiting import PATIENCE

load = library.__wrapped__  # as a fresh process would


def write_compiler(path: Path, body: str) -> Path:
    """A stand-in for a compiler; `$out` is where the library goes."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nfor out; do :; done\n{body}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FORETELL_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_it_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FORETELL_NATIVE", "0")
    assert load() is None
    assert not caplog.records and not (fresh / "home").exists()


def test_no_compiler_is_said_in_one_line(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.DEBUG):
        assert load() is None
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo noise >&2; echo 'pool.cpp:3: error: no such thing' >&2; exit 1", "pool.cpp:3: error: no such thing"),
        ("exit 1", "it said nothing"),
        ("echo rubbish > $out", "file too short|invalid ELF header|not a mach-o"),
    ],
)
def test_a_build_that_fails_is_said_in_one_line(
    body: str, words: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", body)))
    assert load() is None
    (record,) = caplog.records
    assert any(word in record.getMessage() for word in words.split("|")) and "\n" not in record.getMessage()


def test_a_cache_that_cannot_be_written_is_said_in_one_line(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "home").write_text("a file")
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", "exit 0")))
    assert load() is None
    assert len(caplog.records) == 1


def test_sources_flags_and_compiler_each_make_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", "echo > $out")))
    monkeypatch.setattr(build, "SOURCES", fresh)
    (fresh / "a.cpp").write_text("one")
    paths = [build.built_library(), build.built_library()]
    (fresh / "a.cpp").write_text("two")
    paths.append(build.built_library())
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    paths.append(build.built_library())
    (fresh / "cxx").write_text((fresh / "cxx").read_text().replace("echo 1", "echo 2"))
    paths.append(build.built_library())
    assert paths[0] == paths[1] and len(set(paths)) == 4


def test_two_processes_may_build_at_once(fresh: Path) -> None:
    """A compiler that takes its time: nobody ever sees half a library, and nothing is left over."""
    compiler = write_compiler(fresh / "cxx", "printf half > $out; sleep 0.4; printf whole > $out")
    code = "from foretell.kernels.native.build import built_library; print(built_library().read_text())"
    env = os.environ | {"CXX": str(compiler)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    seen: set[str] = set()
    while any(process.poll() is None for process in both):
        seen |= {path.read_text() for path in (fresh / "home/native").glob("*.so")}
        time.sleep(0.02)
    assert [process.communicate()[0] for process in both] == ["whole\n"] * 2
    assert seen <= {"whole"}
    assert [path.suffix for path in (fresh / "home/native").iterdir()] == [".so"]


FORK = """
import os, torch
from foretell.kernels.native.library import library
from foretell.kernels.native.packed import PackedLinear
from foretell.kernels.quantized import Int8Weights

torch.set_num_threads(3)
packed = PackedLinear(library(), Int8Weights(torch.full((960, 576), 3, dtype=torch.int8), torch.ones(960)))
x = torch.randn(8, 576)
expected = packed(x)
if (child := os.fork()) == 0:
    same = all(torch.equal(packed(x), expected) for _ in range(5))
    os._exit(0 if same and len(os.listdir("/proc/self/task")) == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(packed(x), expected)
"""


def test_a_child_of_fork_has_threads_of_its_own_and_exit_does_not_wait_for_them() -> None:
    if library() is None or not Path("/proc/self/task").exists():
        pytest.skip("no C++ compiler is here, or no list of threads")
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=4 * PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
