"""A decoder's weights as the native library reads them, kept on disk for the next start."""

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

from .config import ModelConfig
from .decoder import Decoder
from .layers import Linear
from .load import meta_model
from .quantize import Bits, QuantizedLinear, layer_bits

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint

LOG = logging.getLogger("foretell")
PACKAGE = Path(__file__).parents[1]
# What decides which bytes a checkpoint becomes.
PACKING_SOURCES = ("hub/quants.py", "kernels/quantized.py", "kernels/native/packed.py", "models/*.py")
MIN_CACHED_BYTES = 32 << 20  # bytes; what is smaller is made anew in no time
ABANDONED_SECONDS = 24 * 3600.0  # seconds after which nobody is writing a file any more


@dataclass(frozen=True)
class PackedWeightsCache:
    """The file of one checkpoint in so many bits; None for floats."""

    checkpoint: Checkpoint
    config: ModelConfig
    bits: Bits | None

    @property
    def path(self) -> Path:
        path = self.checkpoint.path.absolute()
        kind = "float32" if self.bits is None else f"int{self.bits}"
        return packed_folder() / f"{path.stem}-{kind}-{hashlib.sha256(bytes(path)).hexdigest()[:12]}"

    def about(self) -> dict[str, Any]:
        """What has to be the same for the file to be of use."""
        path = self.checkpoint.path.absolute()
        return {"checkpoint": str(path), "files": _files(path), "bits": self.bits, "made_by": _made_by()}

    def load(self) -> Decoder | None:
        """The decoder, ready to run; None where it has to be made from the checkpoint, for a reason that is said."""
        native, path = library(), self.path
        assert native is not None, "the file is for the library"
        try:
            return restore_model(native, self.config, self.bits, read_mapped(path, self.about()))
        except FileNotFoundError:
            return None
        except OutdatedError as error:
            LOG.info("%s is made anew: %s", path, error)
        except (MappedFileError, OSError) as error:
            LOG.warning("%s is not used, and made anew: %s", path, error)
        # A header that is intact in itself and yet of other contents: the tensors do not make up this model.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            LOG.warning("%s does not fit the model, so it is packed again: %r", path, error, exc_info=True)
        return None

    def write(self, model: Decoder) -> None:
        """Keep a model that is ready to run. What cannot be kept is loaded as before the next time."""
        tensors = dict(packed_tensors(model))
        if sum(tensor.nbytes for tensor in tensors.values()) < MIN_CACHED_BYTES:
            return
        try:
            write_mapped(self.path, self.about(), tensors)
        except OSError as error:
            LOG.warning("%s cannot be kept, so the next start takes as long: %s", self.path, error)
        remove_stale_files(packed_folder())


def packed_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """All that has to be kept of a model that is ready to run; a tied head is kept packed only."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in linears:
            yield name, parameter.data
    for name, layer in linears.items():
        native = layer.native
        assert native is not None, "only what the library has is kept"
        for part, tensor in (
            ("values", native.weights.values),
            ("scales", native.weights.scales),
            ("bias", native.bias),
        ):
            if tensor is not None:
                yield f"{name}.{part}", tensor


def restore_model(native: Library, config: ModelConfig, bits: Bits | None, tensors: dict[str, Tensor]) -> Decoder:
    """The decoder with these `packed_tensors`, which are copied where the pages of the file are small."""
    model = meta_model(config, torch.float32)
    if not in_huge_pages(max(tensors.values(), key=lambda tensor: tensor.nbytes)):
        room = HugePageArena()
        tensors = {name: room.put(tensor) for name, tensor in tensors.items()}  # all: nothing is in memory twice
    for path, module in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                held = {part: tensors.get(f"{prefix}{name}.{part}") for part in ("values", "scales", "bias")}
                module._modules[name] = _linear(native, child, bits and layer_bits(name, bits), held)
        if not isinstance(module, Linear):
            for name in module._parameters:
                module._parameters[name] = nn.Parameter(tensors[f"{prefix}{name}"], requires_grad=False)
    return model.eval()


def _linear(native: Library, like: Linear, bits: Bits | None, held: dict[str, Tensor | None]) -> Linear:
    values = held["values"]
    assert values is not None, "a layer has weights"
    weights = PackedWeights(bits or 32, like.outputs, like.inputs, values, held["scales"])
    product = PackedLinear(native, weights, held["bias"])
    if bits is not None:
        return QuantizedLinear(product)
    like.weight, like.packed = None, product
    like.bias = None if product.bias is None else nn.Parameter(product.bias, requires_grad=False)
    return like


def remove_stale_files(folder: Path) -> None:
    """Remove files whose checkpoints are gone, and what was never finished."""
    for unfinished in unfinished_folders(folder, time.time() - ABANDONED_SECONDS):
        shutil.rmtree(unfinished, ignore_errors=True)
    for file in folder.glob("*"):
        try:
            if file.is_file() and not Path(read_about(file)["checkpoint"]).exists():
                file.unlink()
        except (MappedFileError, OSError, KeyError, TypeError):
            continue  # whoever asks for it will see what is wrong with it


def _files(path: Path) -> list[list[Any]]:
    """What tells a checkpoint from one that was put in its place."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file in files for stat in (file.stat(),)]


def _made_by() -> str:
    """Changes with the code, and with what it is run by."""
    ways = (torch.__version__, torch.backends.cpu.get_cpu_capability(), sys.byteorder)
    digest = hashlib.sha256(repr(ways).encode())
    for pattern in PACKING_SOURCES:
        for source in sorted(PACKAGE.glob(pattern)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
