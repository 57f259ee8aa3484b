"""Output files: checks made before the work whose result goes into them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from foretell.errors import RequestError


def check_writable(path: Path, field: str = "out") -> None:
    """Raise unless a file can be written at `path`; `field` is the option that named it.

    Creates and deletes a temporary file in the folder, because permission bits do not show every read-only folder.
    """
    if path.is_dir():
        raise RequestError(field, f"{path} is a folder; name a file")
    real = path.resolve()  # a link is followed, as when the file is written
    if not real.parent.is_dir():
        raise RequestError(field, f"there is no folder {path.parent}; create it, or name a file in another folder")
    if real.exists() and not os.access(real, os.W_OK):
        raise RequestError(field, f"{path} is read-only; name another file")
    if real.exists() and not real.is_file():
        return  # a pipe or a device: written directly
    if reason := _refusal(real.parent):
        raise RequestError(field, f"{path} cannot be written: {reason}; name a file in another folder")


def check_folder_writable(path: Path, field: str = "out") -> None:
    """Raise unless files can be written into the folder `path`, which need not exist; it is not created."""
    if path.exists() and not path.is_dir():
        raise RequestError(field, f"{path} is a file; name a folder")
    real = path.resolve()
    nearest = next(each for each in (real, *real.parents) if each.exists())
    if reason := _refusal(nearest):
        raise RequestError(field, f"{path} cannot be written: {reason}; name another folder")


def _refusal(folder: Path) -> str | None:
    """Return why the system refuses a new file in `folder`, None if it does not."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
