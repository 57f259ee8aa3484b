"""The models at hand."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from foretell.hub.catalog import BUILTINS, Builtin
from foretell.hub.home import model_file


@dataclass(frozen=True)
class LocalModel:
    """A model that is on disk, or a built-in that can be."""

    name: str
    path: Path
    size: int
    builtin: bool
    present: bool


def local_models() -> list[LocalModel]:
    """The built-ins, fetched or not, and what Hugging Face's cache holds."""
    return [builtin_model(entry) for entry in BUILTINS.values()] + cached_models()


def builtin_model(entry: Builtin) -> LocalModel:
    """A built-in; it is present when a file of its size is."""
    file = model_file(entry)
    present = file.is_file() and file.stat().st_size == entry.size
    return LocalModel(entry.name, file, entry.size, builtin=True, present=present)


def cached_models() -> list[LocalModel]:
    """The models in Hugging Face's cache; none where its library is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from foretell.hub.huggingface import cached_repos

    return [LocalModel(repo.name, repo.folder, repo.size, builtin=False, present=True) for repo in cached_repos()]
