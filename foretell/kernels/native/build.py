"""Compiling the library, once for each machine's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from foretell.utils.system import folder_lock, home

from .library_file import install, is_whole, make_private

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# Nothing that lets a compiler round otherwise than the source says; instructions are chosen when the library runs.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
MORE_FLAGS = "FORETELL_NATIVE_FLAGS"  # an environment variable: further compiler flags, for sanitizers
PATIENCE = 300.0  # seconds; it takes about five


class BuildError(Exception):
    """Why there is no library, in one line."""


def built_library() -> Path:
    """Return the library's file, compiled now if these sources were not compiled with this compiler before."""
    compiler = find_compiler()
    try:
        path = home() / "native" / f"foretell-{_key(compiler)}.so"
        make_private(path.parent)
        if not is_whole(path):
            with folder_lock(path.parent):
                if not is_whole(path):  # another process may have built it meanwhile
                    _compile(compiler, path)
    except OSError as error:
        raise BuildError(f"{error.filename or compiler}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {PATIENCE:.0f} s") from error
    return path


def find_compiler() -> str:
    """CXX, or the first of the usual names that is here."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler is here (Debian: apt-get install g++)")


def flags() -> tuple[str, ...]:
    """Return the compiler flags of this process."""
    return *FLAGS, *shlex.split(os.environ.get(MORE_FLAGS, ""))


def _key(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and the kind of processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=PATIENCE).stdout
    digest = hashlib.sha256(repr((flags(), platform.system(), platform.machine())).encode() + version)
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Compile next to the goal and rename, so that others see all of the library or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
        done = subprocess.run([compiler, *flags(), *sources, "-o", str(draft)], capture_output=True, timeout=PATIENCE)
        if done.returncode:
            raise BuildError(f"{compiler} failed: {_first_complaint(done.stderr)}")
        install(draft, path)


def _first_complaint(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
