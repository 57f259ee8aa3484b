"""Where models come from: names become files, files become checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foretell.hub.catalog import DEFAULT_MODEL, LocalModel, local_models
from foretell.hub.checkpoint import Checkpoint, open_checkpoint
from foretell.hub.fetch import fetch
from foretell.hub.resolve import resolve, tell
from foretell.hub.tensor import LazyTensor

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "LazyTensor",
    "LocalModel",
    "fetch",
    "local_models",
    "open_checkpoint",
    "pull",
    "resolve",
]


def pull(name: str, say: Callable[[str], None] = tell, revision: str | None = None) -> Path:
    """Make sure that the model is on disk, and return its path."""
    return resolve(name, say, revision)
