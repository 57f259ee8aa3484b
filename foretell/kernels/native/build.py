"""Compiling the library, once for each machine's cache."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from foretell.utils.system import folder_lock, home

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create the folder; PermissionError where it belongs to another user, or where others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not _is_trusted_owner(found):
        message = "belongs to another user, so no library is loaded from it; point FORETELL_HOME at a folder of yours"
        raise PermissionError(errno.EPERM, message, str(folder))
    if found.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)


def is_intact(path: Path) -> bool:
    """Return whether the library is there, belongs to this user, and has the checksum that was written with it."""
    try:
        for file in (path, checksum_file(path)):
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode) or not _is_trusted_owner(found) or found.st_mode & OTHERS_WRITE:
                return False
        return checksum_file(path).read_text() == _checksum(path, path.name)
    except (OSError, UnicodeDecodeError):
        return False


def _is_trusted_owner(found: os.stat_result) -> bool:
    """Return whether a file belongs to this user, or to root as in an image that was built for others."""
    return found.st_uid in (0, os.geteuid())


def checksum_file(path: Path) -> Path:
    """Return where the checksum of a library is."""
    return path.with_name(path.name + ".sha256")


def _checksum(path: Path, name: str) -> str:
    with path.open("rb") as content:
        return f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {name}\n"


def install(draft: Path, path: Path) -> None:
    """Give a compiled library its name, with its checksum, once both are on the disk."""
    checksum = draft.with_name("checksum")
    checksum.write_text(_checksum(draft, path.name))
    for file, mode in ((draft, 0o755), (checksum, 0o644)):
        file.chmod(mode)
        _sync(file)
    checksum.replace(checksum_file(path))
    draft.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# Nothing that lets a compiler round otherwise than the source says; instructions are chosen when the library runs.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
EXTRA_FLAGS_VARIABLE = "FORETELL_NATIVE_FLAGS"  # an environment variable: further compiler flags, for sanitizers
COMPILE_TIMEOUT = 300.0  # seconds; it takes about five


class BuildError(Exception):
    """Why there is no library, in one line."""


def build_library() -> Path:
    """Return the library's file, compiled now if these sources were not compiled with this compiler before."""
    compiler = find_compiler()
    try:
        path = home() / "native" / f"foretell-{_build_key(compiler)}.so"
        make_private(path.parent)
        if not is_intact(path):
            with folder_lock(path.parent):
                if not is_intact(path):  # another process may have built it meanwhile
                    _compile(compiler, path)
    except OSError as error:
        raise BuildError(f"{error.filename or compiler}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {COMPILE_TIMEOUT:.0f} s") from error
    return path


def find_compiler() -> str:
    """CXX, or the first of the usual names that is here."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler is here (Debian: apt-get install g++)")


def flags() -> tuple[str, ...]:
    """Return the compiler flags of this process."""
    return *FLAGS, *shlex.split(os.environ.get(EXTRA_FLAGS_VARIABLE, ""))


def _build_key(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and the kind of processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT).stdout
    digest = hashlib.sha256(repr((flags(), platform.system(), platform.machine())).encode() + version)
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Compile next to the goal and rename, so that others see all of the library or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
        done = subprocess.run(
            [compiler, *flags(), *sources, "-o", str(draft)], capture_output=True, timeout=COMPILE_TIMEOUT
        )
        if done.returncode:
            raise BuildError(f"{compiler} failed: {_first_error(done.stderr)}")
        install(draft, path)


def _first_error(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
