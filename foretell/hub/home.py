"""Where fetched models are kept."""

from __future__ import annotations

from pathlib import Path

from foretell.hub.catalog import Builtin
from foretell.system import home


def model_file(entry: Builtin) -> Path:
    """Where the built-in's file is, or will be once fetched."""
    return home() / "models" / entry.name / entry.file_name
