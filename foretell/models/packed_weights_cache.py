"""A cache on disk of weights packed for the native library, so that the next start neither reads nor packs them."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretell.hub.catalog import packed_folder
from foretell.hub.mapped_file import (
    MappedFileError,
    OutdatedError,
    read_about,
    read_mapped,
    unfinished_folders,
    write_mapped,
)
from foretell.kernels.native.huge_pages import HugePageArena, in_huge_pages
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.packed import PackedLinear, PackedWeights
from foretell.kernels.quant import QuantFormat

from .config import ModelConfig
from .decoder import Decoder
from .layers import Linear
from .load import meta_model
from .quantize import NativeQuantizedLinear, layer_format

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint

LOG = logging.getLogger("foretell")
PACKAGE = Path(__file__).parents[1]
# Modules that decide the bytes of packed weights: a change in one of them invalidates the cache.
PACKING_SOURCES = (
    "hub/gguf_dequant.py",
    "hub/quantized/*.py",
    "kernels/quant.py",
    "kernels/native/packed.py",
    "models/*.py",
)
BITS: dict[QuantFormat | None, int | None] = {None: None, "int8": 8, "int4": 4}  # the format as the file states it
MIN_CACHED_BYTES = 32 << 20  # smaller models are packed faster than they are worth caching
ABANDONED_SECONDS = 24 * 3600.0  # age from which an unfinished file has no writer any more


@dataclass(frozen=True)
class PackedWeightsCache:
    """The cache file of one checkpoint in one format; None for float32."""

    checkpoint: Checkpoint
    config: ModelConfig
    format: QuantFormat | None

    @property
    def path(self) -> Path:
        path = self.checkpoint.path.absolute()
        return (
            packed_folder() / f"{path.stem}-{self.format or 'float32'}-{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
        )

    def about(self) -> dict[str, Any]:
        """Return the header of the file, which must match for the file to be valid."""
        path = self.checkpoint.path.absolute()
        header = {"checkpoint": str(path), "files": _files(path), "made_by": _made_by()}
        return header | {"bits": BITS[self.format], "stored_as": self.checkpoint.quantization}

    def load(self) -> Decoder | None:
        """Return the decoder, ready to run; None if it must be loaded from the checkpoint. Log the reason."""
        native, path = library(), self.path
        assert native is not None, "the file is for the native library"
        try:
            return restore_model(native, self.config, self.format, read_mapped(path, self.about()))
        except FileNotFoundError:
            return None
        except OutdatedError as error:
            LOG.info("%s is outdated and is written again: %s", path, error)
        except (MappedFileError, OSError) as error:
            LOG.warning("%s cannot be used and is written again: %s", path, error)
        # The header is valid, but the tensors do not make up this model.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            LOG.warning("%s does not fit the model, so it is packed again: %r", path, error, exc_info=True)
        return None

    def write(self, model: Decoder) -> None:
        """Write a model that is ready to run. On failure log a warning; the next start loads the checkpoint again."""
        tensors = dict(packed_tensors(model))
        if sum(tensor.nbytes for tensor in tensors.values()) < MIN_CACHED_BYTES:
            return
        try:
            write_mapped(self.path, self.about(), tensors)
        except OSError as error:
            LOG.warning("%s cannot be written, so the next start packs the weights again: %s", self.path, error)
        remove_stale_files(packed_folder())


def packed_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model that is ready to run, by name; a tied LM head only in its packed form."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in linears:
            yield name, parameter.data
    for name, layer in linears.items():
        native = layer.native
        assert native is not None, "every linear layer is packed for the native library"
        for part, tensor in (
            ("values", native.weights.values),
            ("scales", native.weights.scales),
            ("bias", native.bias),
        ):
            if tensor is not None:
                yield f"{name}.{part}", tensor


def restore_model(
    native: Library, config: ModelConfig, format: QuantFormat | None, tensors: dict[str, Tensor]
) -> Decoder:
    """Return the decoder with these `packed_tensors`. They are copied if the mapped file is not in huge pages."""
    model = meta_model(config, torch.float32)
    if not in_huge_pages(max(tensors.values(), key=lambda tensor: tensor.nbytes)):
        arena = HugePageArena()
        tensors = {name: arena.put(tensor) for name, tensor in tensors.items()}  # all, so that the file can be unmapped
    for path, module in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                held = {part: tensors.get(f"{prefix}{name}.{part}") for part in ("values", "scales", "bias")}
                own = None if format is None else layer_format(name, format)
                module._modules[name] = _restore_linear(native, child, own, held)
        if not isinstance(module, Linear):
            for name in module._parameters:
                module._parameters[name] = nn.Parameter(tensors[f"{prefix}{name}"], requires_grad=False)
    return model.eval()


def _restore_linear(
    native: Library, like: Linear, format: QuantFormat | None, held: dict[str, Tensor | None]
) -> Linear:
    values = held["values"]
    assert values is not None, "a layer has weights"
    weights = PackedWeights(BITS[format] or 32, like.outputs, like.inputs, values, held["scales"])
    product = PackedLinear(native, weights, held["bias"])
    if format is not None:
        return NativeQuantizedLinear(product)
    like.weight, like.packed = None, product
    like.bias = None if product.bias is None else nn.Parameter(product.bias, requires_grad=False)
    return like


def remove_stale_files(folder: Path) -> None:
    """Remove files whose checkpoint no longer exists and files that were never finished."""
    for unfinished in unfinished_folders(folder, time.time() - ABANDONED_SECONDS):
        shutil.rmtree(unfinished, ignore_errors=True)
    for file in folder.glob("*"):
        try:
            if file.is_file() and not Path(read_about(file)["checkpoint"]).exists():
                file.unlink()
        except (MappedFileError, OSError, KeyError, TypeError):
            continue  # the next `load` of that file reports what is wrong with it


def _files(path: Path) -> list[list[Any]]:
    """Return name, size and modification time of each file, which change when a checkpoint is replaced."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file in files for stat in (file.stat(),)]


def _made_by() -> str:
    """Return a digest of the packing code, the torch version, the CPU capability and the byte order."""
    platform = (torch.__version__, torch.backends.cpu.get_cpu_capability(), sys.byteorder)
    digest = hashlib.sha256(repr(platform).encode())
    for pattern in PACKING_SOURCES:
        for source in sorted(PACKAGE.glob(pattern)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
