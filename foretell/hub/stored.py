"""Disk usage of models: their files, and the packed weights that were made from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import UnknownModelError
from foretell.hub.catalog import BUILTINS, builtin_model, cached_models, packed_folder
from foretell.hub.mapped_file import MappedFileError, read_about
from foretell.hub.resolve import FORMS, checked_file

REPO_LEVELS = 2  # a snapshot of Hugging Face's cache is in REPO/snapshots/REVISION


@dataclass(frozen=True)
class StoredFiles:
    """A file or folder that can be removed; `about` says what it is."""

    about: str
    path: Path
    size: int  # bytes

    def remove(self) -> None:
        """Delete the file or the folder."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


def local_path(name: str) -> Path:
    """Return the folder or GGUF file of a model on this machine; never download it."""
    if name in BUILTINS:
        found = builtin_model(BUILTINS[name])
        if found.present:
            return found.path
        raise UnknownModelError(f"{name} is not downloaded; fetch it with `foretell pull {name}`")
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        return checked_file(path)
    for model in cached_models():
        if model.name.lower() == name.lower():
            return model.path
    hint = f"fetch it with `foretell pull {name}`" if "/" in name else FORMS
    raise UnknownModelError(f"there is no model {name!r} on this machine; {hint}")


def stored_model(name: str) -> StoredFiles:
    """Return the files of a downloaded model. A model that Foretell did not download is refused."""
    path = local_path(name)
    if name in BUILTINS:
        return StoredFiles("model", path.parent, _size(path.parent))
    if os.path.exists(os.path.expanduser(name)):
        raise UnknownModelError(f"{name} is your own file; only downloaded models are removed, so delete it yourself")
    folder = path.parents[REPO_LEVELS - 1]
    return StoredFiles("model", folder, _size(folder))


def packed_weights(model: Path | None = None) -> list[StoredFiles]:
    """Return the packed weights made from files in the folder `model`, or all of them."""
    files = sorted(packed_folder().glob("*")) if packed_folder().is_dir() else []
    return [
        StoredFiles("packed weights", file, file.stat().st_size)
        for file in files
        if file.is_file() and (model is None or _is_made_from(file, model))
    ]


def _is_made_from(file: Path, model: Path) -> bool:
    try:
        source = Path(read_about(file)["checkpoint"])
    except (MappedFileError, OSError, KeyError, TypeError):
        return False
    return source.is_relative_to(model)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder; a link to a file inside it counts once."""
    return (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
