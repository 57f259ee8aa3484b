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
    try:
        with tempfile.TemporaryFile(dir=real.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(field, f"{path} cannot be written: {reason}; name a file in another folder") from None
