"""A model on disk: a folder or a GGUF file, opened once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foretell.errors import ModelError
from foretell.hub.folder import CONFIG, check_folder, folder_tensors, read_generation, read_json, read_tokenizer_files
from foretell.hub.gguf_file import open_gguf
from foretell.hub.tensor import LazyTensor


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
