"""What the system lends: a folder for what is kept between runs, and memory that it can have back."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path


def home() -> Path:
    """The cache folder: FORETELL_HOME, or `foretell` in the user's cache folder."""
    if own := os.environ.get("FORETELL_HOME"):
        return Path(os.path.expanduser(own)).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)).absolute() / "foretell"


def give_back() -> None:
    """Let the system have what was freed; after a load the C library would keep a few hundred megabytes of it."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
