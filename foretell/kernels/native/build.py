"""Compiles the native library, once per machine and compiler or into a wheel, and checks a file before it is loaded.

Loading a library runs its code, and a truncated library ends the process with SIGBUS. So each has its SHA-256 next to
it, in the format of `sha256sum`, and neither file nor folder may be writable by other users.

`setup.py` compiles the library of a wheel, so that users need no compiler. It has the flags of a library that is
compiled on first use, and the same functions for each instruction set, so both return the same bits. Its file name has
a digest of the sources: a library of other sources is not found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from foretell.utils.private_files import is_private_file, make_private
from foretell.utils.system import folder_lock, home

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# No flag that lets the compiler change rounding. Instruction sets are selected when the library is loaded.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
EXTRA_FLAGS_VARIABLE = "FORETELL_NATIVE_FLAGS"  # environment variable with extra compiler flags, for sanitizers
COMPILE_TIMEOUT = 300.0  # seconds; a build takes about five


def is_intact(path: Path) -> bool:
    """Return whether the library is there, belongs to this user, and has the checksum that was written with it."""
    try:
        return all(map(is_private_file, (path, checksum_file(path)))) and has_checksum(path)
    except OSError:
        return False


def has_checksum(path: Path) -> bool:
    """Return whether the library is there and has the checksum that was written with it."""
    try:
        return checksum_file(path).read_text() == _checksum(path, path.name)
    except (OSError, UnicodeDecodeError):
        return False


def checksum_file(path: Path) -> Path:
    """Return the path of a library's checksum."""
    return path.with_name(path.name + ".sha256")


def _checksum(path: Path, name: str) -> str:
    with path.open("rb") as content:
        return f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {name}\n"


def install(built: Path, path: Path) -> None:
    """Move a compiled library and its checksum into place after both are on disk."""
    checksum = built.with_name("checksum")
    checksum.write_text(_checksum(built, path.name))
    for file, mode in ((built, 0o755), (checksum, 0o644)):
        file.chmod(mode)
        _sync(file)
    checksum.replace(checksum_file(path))
    built.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class BuildError(Exception):
    """The reason why there is no library, in one line."""


def build_library() -> Path:
    """Return the path of the library, after compiling it if no intact build of these sources is cached."""
    compiler = find_compiler()
    try:
        path = home() / "native" / f"foretell-{_build_key(compiler)}.so"
        make_private(path.parent)
        if not is_intact(path):
            with folder_lock(path.parent):
                if not is_intact(path):  # another process may have built it meanwhile
                    compile_library(compiler, flags(), path)
    except OSError as error:
        raise BuildError(f"{error.filename or compiler}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {COMPILE_TIMEOUT:.0f} s") from error
    return path


def find_compiler() -> str:
    """Return the compiler: CXX, or the first of the usual names that is installed."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler is installed (Debian: apt-get install g++)")


def flags() -> tuple[str, ...]:
    """Return the compiler flags of this process."""
    return *FLAGS, *shlex.split(os.environ.get(EXTRA_FLAGS_VARIABLE, ""))


def _build_key(compiler: str) -> str:
    """Return a digest of sources, flags, compiler version and platform."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT).stdout
    return source_key(flags(), version)


def source_key(flags: tuple[str, ...], compiler: bytes = b"") -> str:
    """Return a digest of sources, flags, platform and what identifies a compiler."""
    digest = hashlib.sha256(repr((flags, platform.system(), platform.machine())).encode() + compiler)
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def compile_library(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile in a temporary folder and rename, so that other processes never see a partial library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
        done = subprocess.run(
            [compiler, *flags, *sources, "-o", str(built)], capture_output=True, timeout=COMPILE_TIMEOUT
        )
        if done.returncode:
            raise BuildError(f"{compiler} failed: {_first_error(done.stderr)}")
        install(built, path)


def _first_error(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no error message")


PREBUILT = SOURCES / "prebuilt"


def prebuilt_name() -> str:
    """Return the file name of a library of these sources for this platform."""
    return f"foretell-{source_key(FLAGS)}.so"


def find_prebuilt() -> Path | None:
    """Return the library of the package; None if there is none for these sources, or extra compiler flags are set.

    Its owner is not checked: a user who can write to the package can change its Python code as well.
    """
    if os.environ.get(EXTRA_FLAGS_VARIABLE) or not PREBUILT.is_dir():
        return None
    path = PREBUILT / prebuilt_name()
    return path if has_checksum(path) else None


def compile_prebuilt(folder: Path) -> Path:
    """Compile the library for a wheel into the folder and return its path, or raise BuildError."""
    path = folder / prebuilt_name()
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    try:
        compile_library(compiler, FLAGS, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return path
