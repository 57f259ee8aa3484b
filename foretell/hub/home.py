"""Where fetched models are kept, and what is made of models."""

from __future__ import annotations

from pathlib import Path

from foretell.hub.catalog import Builtin
from foretell.utils.system import home


def model_file(entry: Builtin) -> Path:
    """Where the built-in's file is, or will be once fetched."""
    return home() / "models" / entry.name / entry.file_name


def packed_folder() -> Path:
    """Where weights are kept as they run. All of it can be deleted: the next start makes it anew."""
    return home() / "packed"
