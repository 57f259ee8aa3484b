"""A model on disk: a folder or a GGUF file, opened once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub.gguf_file import open_gguf
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no model, in words that name what it lacks."""
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        raise UnsupportedModelError(f"{folder}: an adapter, no whole model; merge it into its base model first")
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelError(f"{folder}: holds pickled weights, which can run code; convert them to safetensors")
        if found := sorted(file.name for file in folder.glob("*.gguf")):
            raise ModelError(f"{folder}: has no *.safetensors; name the GGUF file itself: {', '.join(found)}")
        raise ModelError(f"{folder}: has no *.safetensors; name a folder with config.json and *.safetensors")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: has no config.json, which says what the weights are")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds no JSON object")
    return content


def read_text(file: Path) -> str:
    """A file's text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


def read_generation(folder: Path) -> dict[str, Any]:
    """What the model's makers advise for sampling, if they do."""
    file = folder / GENERATION
    return read_json(file) if file.is_file() else {}


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """The texts of the tokenizer's files, as far as they are there."""
    return {name: read_text(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the model; a single file goes before an index, as transformers has it."""
    if (folder / WEIGHTS).is_file():
        return file_tensors(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return indexed_tensors(folder)
    return merged_tensors(sorted(folder.glob("*.safetensors")))


def merged_tensors(files: list[Path]) -> dict[str, LazyTensor]:
    """The tensors of all the files, which have none in common."""
    merged: dict[str, LazyTensor] = {}
    for file in files:
        tensors = file_tensors(file)
        if twice := sorted(merged.keys() & tensors.keys()):
            raise ModelError(f"{file}: has {twice[0]!r}, which another file of the folder has too; keep one of them")
        merged |= tensors
    return merged


def indexed_tensors(folder: Path) -> dict[str, LazyTensor]:
    """The tensors an index lists, each from the file it names."""
    places = read_index(folder / INDEX)
    missing = sorted({name for name in places.values() if not (folder / name).is_file()})
    if missing:
        raise ModelError(f"{folder}: lacks {', '.join(missing)}, which {INDEX} lists; fetch the model again")
    files = {name: file_tensors(folder / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise ModelError(f"{folder / file}: lacks tensor {name!r}, which {INDEX} lists; fetch the model again")
    return {name: files[file][name] for name, file in places.items()}


def read_index(file: Path) -> Mapping[str, str]:
    """Which file holds which tensor."""
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{file}: has no weight_map from tensors to files")
    for name in places.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{file}: names {name!r}, which is no safetensors file of this folder")
    return places


def file_tensors(file: Path) -> dict[str, LazyTensor]:
    """The tensors of one safetensors file, mapped into memory."""
    from safetensors import SafetensorError, safe_open

    try:
        content: Any = safe_open(file, framework="pt")
        names = content.keys()
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(file, error) from error
    return {
        name: LazyTensor(
            name, shape, partial(read_tensor, file, content, name), partial(read_tensor, file, content, name)
        )
        for name, shape in shapes.items()
    }


def read_tensor(file: Path, content: Any, name: str, *rows: int) -> torch.Tensor:
    """One tensor as it is stored, or its rows from one to another."""
    from safetensors import SafetensorError

    try:
        tensor: torch.Tensor = content.get_slice(name)[slice(*rows)] if rows else content.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
        raise damaged(file, error) from error
    return tensor


def damaged(file: Path, error: Exception) -> ModelError:
    """The one line for a file safetensors will not read."""
    reason = " ".join(str(error).split())
    return ModelError(f"{file}: damaged safetensors file: {reason}; fetch it again")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a model's files say; its tensors are read one at a time."""

    path: Path
    kind: Literal["folder", "gguf"]
    config: Mapping[str, Any] = field(repr=False)
    generation: Mapping[str, Any] = field(repr=False)
    tokenizer_files: Mapping[str, str] = field(repr=False)
    lazy_tensors: Mapping[str, LazyTensor] = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Each tensor with its name, none of them read yet."""
        yield from self.lazy_tensors.items()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model folder or a GGUF file; everything but the tensors' values is read and checked."""
    if os.path.isdir(path):
        return open_folder(path)
    if os.path.isfile(path):
        file = open_gguf(path)
        return Checkpoint(path, "gguf", file.metadata, {}, {}, file.tensors())
    raise ModelError(f"{path}: no such file or folder")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors."""
    check_folder(folder)
    config = read_json(folder / CONFIG)
    generation = read_generation(folder)
    return Checkpoint(folder, "folder", config, generation, read_tokenizer_files(folder), folder_tensors(folder))
