"""A package that carries the native library needs no compiler; anything wrong with it leads back to compiling."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from foretell.kernels.native import build
from foretell.kernels.native.library import library
from tests.kernels.test_native import load, write_compiler


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose library a stand-in compiler wrote, and an empty cache folder."""
    for name in ("FORETELL_NATIVE", build.EXTRA_FLAGS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", "echo whole > $out")))
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "a.cpp").write_text("one")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PREBUILT", sources / "prebuilt")
    return build.compile_prebuilt(sources / "prebuilt")


def test_the_library_of_a_package_is_found_with_its_checksum(package: Path) -> None:
    assert build.find_prebuilt() == package and package.read_text() == "whole\n"
    assert sorted(os.listdir(package.parent)) == [package.name, package.name + ".sha256"]


def test_a_group_may_write_to_the_package_as_with_its_python_code(package: Path) -> None:
    package.chmod(0o775)
    assert build.find_prebuilt() == package


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "other sources": lambda path, _: (path.parents[1] / "a.cpp").write_text("two"),
    "one more source": lambda path, _: (path.parents[1] / "b.h").write_text(""),
    "other flags": lambda path, patch: patch.setattr(build, "FLAGS", ("-O0",)),
    "extra flags": lambda path, patch: patch.setenv(build.EXTRA_FLAGS_VARIABLE, "-g"),
    "another machine": lambda path, patch: patch.setattr(build.platform, "machine", lambda: "aarch64"),
    "half a file": lambda path, _: os.truncate(path, 3),
    "no checksum": lambda path, _: build.checksum_file(path).unlink(),
    "a pure wheel": lambda path, _: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_library_that_does_not_match_is_not_used(change: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES[change](package, monkeypatch)
    assert build.find_prebuilt() is None


def test_a_library_that_cannot_be_loaded_here_is_compiled(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="foretell"):
        assert load() is None, "the stand-in's library is not one, either"
    first, last = (record.getMessage() for record in caplog.records)
    assert "cannot be loaded" in first and "compiled here" in first
    assert "no native kernels" in last and list((package.parents[2] / "home" / "native").glob("*.so"))


@pytest.mark.skipif(library() is None, reason="no C++ compiler is here")
def test_without_a_compiler_the_library_of_the_package_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = shutil.copy(build.build_library(), tmp_path / "built")
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    build.install(Path(compiled), tmp_path / build.prebuilt_name())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, logger="foretell"):
        found = load()
    assert found is not None and found.path == str(tmp_path / build.prebuilt_name())
    (record,) = caplog.records
    assert record.getMessage().startswith("native kernels: ") and "from the package" in record.getMessage()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("body", "words"), [("echo 'a.cpp:1: error: no' >&2; exit 1", "error: no"), (None, "no C++")])
def test_a_wheel_without_a_working_compiler_says_why_it_has_no_library(
    body: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if body:
        monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", body)))
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=words.replace("+", r"\+")):
        build.compile_prebuilt(tmp_path / "out")
