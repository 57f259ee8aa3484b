"""Where fetched models are kept."""

from __future__ import annotations

import os
from pathlib import Path

from foretell.hub.catalog import Builtin


def home() -> Path:
    """The cache folder: FORETELL_HOME, or `foretell` in the user's cache folder."""
    if own := os.environ.get("FORETELL_HOME"):
        return Path(os.path.expanduser(own)).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)).absolute() / "foretell"


def model_file(entry: Builtin) -> Path:
    """Where the built-in's file is, or will be once fetched."""
    return home() / "models" / entry.name / entry.file_name
