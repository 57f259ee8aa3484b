"""Checkpoints on disk: Hugging Face folders with safetensors, and GGUF files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub.gguf_file import open_gguf
from foretell.hub.quantized import dequantized_tensors, describe_formats, read_quantization
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
# Older tools keep the quantization config next to config.json: AutoGPTQ, AutoAWQ and NVIDIA ModelOpt.
QUANTIZATION = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF_LAYERS = "blk."  # the prefix of the tensors of layers
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a model, and name what is missing."""
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        raise UnsupportedModelError(f"{folder}: an adapter, not a full model; merge it into its base model first")
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelError(f"{folder}: has pickled weights, which can run code; convert them to safetensors")
        if found := sorted(file.name for file in folder.glob("*.gguf")):
            raise ModelError(f"{folder}: has no *.safetensors; name the GGUF file itself: {', '.join(found)}")
        raise ModelError(f"{folder}: has no *.safetensors; name a folder with config.json and *.safetensors")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: has no config.json, which describes the model")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: is not a JSON object")
    return content


def read_text(file: Path) -> str:
    """Read a UTF-8 file, or raise ModelError with the reason."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


def read_generation(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json, empty if there is none."""
    file = folder / GENERATION
    return read_json(file) if file.is_file() else {}


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the quantization config of a file next to it, if it has none itself."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in QUANTIZATION.items():
        if (folder / name).is_file():
            return config | {"quantization_config": {"quant_method": method} | read_json(folder / name)}
    return config


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the contents of the tokenizer files that exist, by name."""
    return {name: read_text(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return every tensor of the model; a single file takes precedence over an index, as in transformers."""
    if (folder / WEIGHTS).is_file():
        return file_tensors(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return indexed_tensors(folder)
    return merged_tensors(sorted(folder.glob("*.safetensors")))


def decoded_tensors(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """Return the tensors of a folder with quantized layers as weights, if its config states a quantization."""
    found = read_quantization(config)
    return tensors if found is None else dequantized_tensors(tensors, found)


def merged_tensors(files: list[Path]) -> dict[str, LazyTensor]:
    """Return the tensors of all files, which must be disjoint."""
    merged: dict[str, LazyTensor] = {}
    for file in files:
        tensors = file_tensors(file)
        if twice := sorted(merged.keys() & tensors.keys()):
            raise ModelError(f"{file}: has {twice[0]!r}, which another file of the folder also has; keep one of them")
        merged |= tensors
    return merged


def indexed_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of an index, each from its file."""
    files_by_tensor = read_index(folder / INDEX)
    missing = sorted({name for name in files_by_tensor.values() if not (folder / name).is_file()})
    if missing:
        raise ModelError(f"{folder}: lacks {', '.join(missing)}, which {INDEX} lists; download the model again")
    files = {name: file_tensors(folder / name) for name in sorted(set(files_by_tensor.values()))}
    for name, file in files_by_tensor.items():
        if name not in files[file]:
            raise ModelError(f"{folder / file}: lacks tensor {name!r}, which {INDEX} lists; download the model again")
    return {name: files[file][name] for name, file in files_by_tensor.items()}


def read_index(file: Path) -> Mapping[str, str]:
    """Return the file of each tensor."""
    files_by_tensor = read_json(file).get("weight_map")
    if not isinstance(files_by_tensor, dict) or not all(isinstance(name, str) for name in files_by_tensor.values()):
        raise ModelError(f"{file}: has no weight_map from tensors to files")
    for name in files_by_tensor.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{file}: names {name!r}, which is not a safetensors file of this folder")
    return files_by_tensor


def file_tensors(file: Path) -> dict[str, LazyTensor]:
    """Return the tensors of one memory-mapped safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        content: Any = safe_open(file, framework="pt")
        names = content.keys()
        slices = {name: content.get_slice(name) for name in names}
        headers = {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(file, error) from error
    return {
        name: LazyTensor(
            name,
            shape,
            partial(read_tensor, file, content, name),
            partial(read_tensor, file, content, name),
            dtype=str(dtype),
        )
        for name, (shape, dtype) in headers.items()
    }


def read_tensor(file: Path, content: Any, name: str, *rows: int) -> torch.Tensor:
    """Read a tensor as stored, or a range of its rows."""
    from safetensors import SafetensorError

    try:
        tensor: torch.Tensor = content.get_slice(name)[slice(*rows)] if rows else content.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
        raise damaged(file, error) from error
    return tensor


def damaged(file: Path, error: Exception) -> ModelError:
    """Return the error for a file that safetensors cannot read."""
    reason = " ".join(str(error).split())
    return ModelError(f"{file}: damaged safetensors file: {reason}; download it again")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The config, tokenizer files and lazy tensors of a model."""

    path: Path
    kind: Literal["folder", "gguf"]
    config: Mapping[str, Any] = field(repr=False)
    generation: Mapping[str, Any] = field(repr=False)
    tokenizer_files: Mapping[str, str] = field(repr=False)
    lazy_tensors: Mapping[str, LazyTensor] = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield each tensor with its name, without reading it. Weights of quantized layers are decoded on reading."""
        yield from self._decoded.items()

    @cached_property
    def quantization(self) -> str | None:
        """Return how the weights are quantized, in words; None for floats.

        A GGUF file counts as quantized by the matrices of its layers: an embedding in 8 bits does not make it so.
        """
        if self.kind == "gguf":
            layers = (tensor for name, tensor in self.lazy_tensors.items() if name.startswith(GGUF_LAYERS))
            quantized = any(tensor.stored is not None for tensor in layers)
            return describe_formats(self.lazy_tensors.values(), "GGUF") if quantized else None
        found = read_quantization(self.config)
        return None if found is None else describe_formats(self._decoded.values(), found.method)

    @cached_property
    def _decoded(self) -> Mapping[str, LazyTensor]:
        return self.lazy_tensors if self.kind == "gguf" else decoded_tensors(self.config, self.lazy_tensors)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model folder or a GGUF file; read and check everything but the tensors' values."""
    if os.path.isdir(path):
        return open_folder(path)
    if os.path.isfile(path):
        file = open_gguf(path)
        return Checkpoint(path, "gguf", file.metadata, {}, {}, file.tensors())
    raise ModelError(f"{path}: no such file or folder")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors."""
    check_folder(folder)
    config = with_quantization(folder, read_json(folder / CONFIG))
    generation = read_generation(folder)
    return Checkpoint(folder, "folder", config, generation, read_tokenizer_files(folder), folder_tensors(folder))
