"""Model sources: resolution of names, downloads, and checkpoint files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foretell.hub.catalog import DEFAULT_MODEL, LocalModel, local_models
from foretell.hub.checkpoint import Checkpoint, open_checkpoint
from foretell.hub.fetch import fetch
from foretell.hub.resolve import log_stderr, resolve
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


def pull(name: str, say: Callable[[str], None] = log_stderr, revision: str | None = None) -> Path:
    """Download a model if needed and return its path."""
    return resolve(name, say, revision)
