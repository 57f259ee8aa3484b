"""The library is built once, atomically, by the first process, and is optional if it cannot be built."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.kernels.native import build
from foretell.kernels.native.library import library
from foretell.utils import private_files
from tests.waiting import TIMEOUT

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
        ("exit 1", "no error message"),
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
    paths = [build.build_library(), build.build_library()]
    (fresh / "a.cpp").write_text("two")
    paths.append(build.build_library())
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    paths.append(build.build_library())
    (fresh / "cxx").write_text((fresh / "cxx").read_text().replace("echo 1", "echo 2"))
    paths.append(build.build_library())
    assert paths[0] == paths[1] and len(set(paths)) == 4


def test_two_processes_may_build_at_once(fresh: Path) -> None:
    """With a slow compiler no process sees a partial library, and no temporary file is left."""
    compiler = write_compiler(fresh / "cxx", "printf half > $out; sleep 0.4; printf whole > $out")
    code = "from foretell.kernels.native.build import build_library; print(build_library().read_text())"
    env = os.environ | {"CXX": str(compiler)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    seen: set[str] = set()
    while any(process.poll() is None for process in both):
        seen |= {path.read_text() for path in (fresh / "home/native").glob("*.so")}
        time.sleep(0.02)
    assert [process.communicate()[0] for process in both] == ["whole\n"] * 2
    assert seen <= {"whole"}
    left = {path for path in (fresh / "home/native").iterdir() if path.name != ".lock"}
    assert sorted(path.suffix for path in left) == [".sha256", ".so"]


def test_only_a_file_open_for_writing_is_locked(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS refuses an exclusive lock on anything else."""
    locks: list[int] = []

    def flock(handle: Any, operation: int) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        locks.append(operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", "echo whole > $out")))
    assert build.build_library().read_text() == "whole\n" and locks


COUNTED = "echo >> $(dirname $0)/calls; echo whole > $out"


@pytest.fixture
def built(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that a stand-in compiler wrote; each call of the compiler is a line in `calls`."""
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", COUNTED)))
    return build.build_library()


def calls(fresh: Path) -> int:
    return len((fresh / "calls").read_text().splitlines())


def test_a_whole_library_is_not_built_again(built: Path, fresh: Path) -> None:
    assert build.build_library() == built and calls(fresh) == 1
    line = built.with_name(built.name + ".sha256").read_text()
    assert line == f"{hashlib.sha256(built.read_bytes()).hexdigest()}  {built.name}\n"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half": lambda path: os.truncate(path, 3),
    "empty": lambda path: os.truncate(path, 0),
    "one byte": lambda path: path.write_bytes(b"Whole\n"),
    "no checksum": lambda path: path.with_name(path.name + ".sha256").unlink(),
    "half a checksum": lambda path: os.truncate(path.with_name(path.name + ".sha256"), 30),
    "a checksum that is no text": lambda path: path.with_name(path.name + ".sha256").write_bytes(b"\xff"),
    "writable by the group": lambda path: path.chmod(0o775),
    "writable by all": lambda path: path.chmod(0o757),
    "a link": lambda path: path.rename(path.with_name("other")).exists() and path.symlink_to("other"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_library_is_built_again(built: Path, fresh: Path, damage: str) -> None:
    DAMAGES[damage](built)
    assert build.build_library() == built and calls(fresh) == 2
    assert built.read_text() == "whole\n" and built.lstat().st_mode & 0o22 == 0


def test_a_library_of_another_user_is_not_loaded(
    built: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_files, "is_trusted_owner", lambda found: stat.S_ISDIR(found.st_mode))
    assert not build.is_intact(built)
    monkeypatch.setattr(private_files, "is_trusted_owner", lambda found: False)
    assert load() is None
    (record,) = caplog.records
    assert "belongs to another user" in record.getMessage() and "FORETELL_HOME" in record.getMessage()


def test_a_folder_that_others_may_write_to_is_made_private(built: Path) -> None:
    built.parent.chmod(0o777)
    build.build_library()
    assert built.parent.stat().st_mode & 0o22 == 0


def test_file_and_folder_reach_the_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(build, "_sync", lambda path: order.append(path.suffix or path.name))
    monkeypatch.setenv("CXX", str(write_compiler(fresh / "cxx", COUNTED)))
    monkeypatch.setattr(Path, "replace", lambda self, goal: (order.append("rename"), os.replace(self, goal)))
    build.build_library()
    assert order == [".so", "checksum", "rename", "rename", "native"]


HALF = """
import os, sys
from foretell.kernels.native.build import build_library
from foretell.kernels.native.library import library
from foretell.utils import private_files
path = build_library()
os.truncate(path, os.path.getsize(path) // 2)
assert library() is not None
"""


@pytest.mark.skipif(library() is None, reason="no native kernels here")
def test_half_a_library_does_not_end_the_process(tmp_path: Path) -> None:
    """Loaded as it is, it would end with SIGBUS. The stand-in for a compiler copies a library that is whole."""
    compiler = write_compiler(tmp_path / "cxx", f"cp {build.build_library()} $out")
    env = os.environ | {"CXX": str(compiler), "FORETELL_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", HALF], env=env, timeout=TIMEOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FORK = """
import os, torch
from foretell.kernels.native.library import library
from foretell.utils import private_files
from foretell.kernels.native.packed import PackedLinear
from foretell.kernels.quant import Int8Weights

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
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=4 * TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
