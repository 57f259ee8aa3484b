"""The native library in the package: wheels carry one, so that users need no compiler.

`setup.py` compiles it while a wheel is built. It has the flags of a library that is compiled on first use, and the
same functions for each instruction set, so both return the same bits. Its file name has a digest of the sources: a
library of other sources is not found.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .build import (
    EXTRA_FLAGS_VARIABLE,
    FLAGS,
    SOURCES,
    BuildError,
    compile_library,
    find_compiler,
    has_checksum,
    source_key,
)

FOLDER = SOURCES / "prebuilt"


def file_name() -> str:
    """Return the file name of a library of these sources for this platform."""
    return f"foretell-{source_key(FLAGS)}.so"


def find_prebuilt() -> Path | None:
    """Return the library of the package; None if there is none for these sources, or extra compiler flags are set.

    Its owner is not checked: a user who can write to the package can change its Python code as well.
    """
    if os.environ.get(EXTRA_FLAGS_VARIABLE) or not FOLDER.is_dir():
        return None
    path = FOLDER / file_name()
    return path if has_checksum(path) else None


def compile_prebuilt(folder: Path) -> Path:
    """Compile the library for a wheel into the folder and return its path, or raise BuildError."""
    path = folder / file_name()
    folder.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    try:
        compile_library(compiler, FLAGS, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return path
