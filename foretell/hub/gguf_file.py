"""GGUF files: metadata and tensor offsets. The gguf package takes seconds to read a vocabulary."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub.gguf_dequant import KNOWN_TYPES, UNQUANTIZED, can_dequantize, dequantize
from foretell.hub.tensor import LazyTensor, StoredFormat

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NESTING = 4
LENGTH = struct.Struct("<Q")
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape, type and byte range of a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """An open, memory-mapped GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensor_infos: tuple[TensorInfo, ...]
    data: mmap.mmap = field(repr=False)

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the lazy tensors by name."""
        return {info.name: self.tensor(info) for info in self.tensor_infos}

    def tensor(self, info: TensorInfo) -> LazyTensor:
        """Return a lazy tensor. Q4_0 is our own int4 with float16 scales: symmetric, in groups of 32."""
        is_float = info.kind in UNQUANTIZED
        return LazyTensor(
            info.name,
            info.shape,
            partial(self.read, info),
            partial(self.read_rows, info),
            dtype=info.kind if is_float else "",
            stored=None if is_float else StoredFormat(info.kind, fits_int4=info.kind == "Q4_0"),
        )

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Read a tensor; quantized ones as float32, others in their own type."""
        import numpy as np

        raw = np.frombuffer(self.data, dtype=np.uint8, count=info.size, offset=info.start)
        return dequantize(raw, info.kind, info.shape)

    def read_rows(self, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Read some rows of a tensor; a row consists of complete blocks."""
        row, (rows, *rest) = info.size // info.shape[0], info.shape
        start, stop, _ = slice(start, stop).indices(rows)
        num = stop - start
        part = TensorInfo(info.name, (num, *rest), info.kind, info.start + start * row, num * row)
        return self.read(part)


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file; check its header and that all tensors lie inside it."""
    try:
        data = map_file(path)
        cursor = Cursor(data)
        tensor_count, value_count = read_preamble(path, cursor)
        metadata = read_metadata(cursor, value_count)
        check_split(path, metadata)
        tensor_infos = read_tensor_infos(path, cursor, tensor_count, alignment(metadata))
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path}: damaged GGUF file: {error}; download it again") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return GgufFile(path, metadata, tensor_infos, data)


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately, because torch needs writable memory."""
    with path.open("rb") as handle:
        if handle.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path}: not a GGUF file; name a .gguf file, or a folder with *.safetensors")
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)


class Cursor:
    """Reads consecutive values of the header with bounds checks."""

    def __init__(self, data: mmap.mmap, position: int = len(MAGIC)) -> None:
        self.data = data
        self.position = position

    def skip(self, size: int) -> int:
        """Advance by `size` bytes and return where they begin."""
        start = self.position
        if size > len(self.data) - start:
            raise ValueError("it ends inside its header")
        self.position = start + size
        return start

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """Read `count` numbers of one type."""
        size = struct.calcsize("<" + code) * count
        return struct.unpack_from(f"<{count}{code}", self.data, self.skip(size))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings in a tight loop: vocabularies have hundreds of thousands."""
        data, position, found = self.data, self.position, []
        last = len(data) - LENGTH.size
        for _ in range(count):
            if position > last:
                raise ValueError("it ends inside its header")
            begin = position + LENGTH.size
            position = begin + LENGTH.unpack_from(data, position)[0]
            found.append(data[begin:position].decode())
        self.skip(position - self.position)
        return found

    def value(self, kind: int, nesting: int = 0) -> Any:
        """Read a value of a metadata type."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY and nesting < MAX_NESTING:
            return self.array(nesting + 1)
        raise ValueError(f"unknown value type {kind} at byte {self.position}")

    def array(self, nesting: int) -> list[Any]:
        """Read an array of values of one type."""
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        if kind == STRING:
            return self.strings(count)
        return [self.value(kind, nesting) for _ in range(count)]


def read_preamble(path: Path, cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata values."""
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path}: a big-endian GGUF file; convert it to little-endian")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{path}: GGUF version {version}; versions 2 and 3 are supported; convert it again")
    return cursor.number("Q"), cursor.number("Q")


def read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    """Read `count` key-value pairs; keys are unique."""
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key, kind = cursor.string(), cursor.number("I")
        if key in metadata:
            raise ValueError(f"it has {key!r} twice")
        metadata[key] = cursor.value(kind)
    return metadata


def check_split(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse one shard of a split model."""
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(f"{path}: one of {count} files; join them with `llama-gguf-split --merge`")


def alignment(metadata: Mapping[str, Any]) -> int:
    """Return the alignment of tensor data in bytes."""
    size = metadata.get("general.alignment", 32)
    if not isinstance(size, int) or size < 1 or size & (size - 1):
        raise ValueError(f"general.alignment is {size!r}, not a power of two")
    return size


def read_tensor_infos(path: Path, cursor: Cursor, count: int, aligned: int) -> tuple[TensorInfo, ...]:
    """Read the tensor table; check byte ranges and types."""
    tensor_infos: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = read_tensor_info(path, cursor)
        if info.name in tensor_infos:
            raise ValueError(f"it has tensor {info.name!r} twice")
        tensor_infos[info.name] = info
    base = -(-cursor.position // aligned) * aligned
    moved = [TensorInfo(p.name, p.shape, p.kind, base + p.start, p.size) for p in tensor_infos.values()]
    for info in moved:
        check_inside(info, len(cursor.data))
    check_kinds(path, moved)
    return tuple(moved)


def read_tensor_info(path: Path, cursor: Cursor) -> TensorInfo:
    """Read one entry of the tensor table, with its offset relative to the data section."""
    name, dimensions = cursor.string(), cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    # GGUF lists the fastest dimension first, torch last.
    shape = cursor.numbers("Q", dimensions)[::-1]
    code, start = cursor.number("I"), cursor.number("Q")
    kind, block, size = kind_of(path, name, code)
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, which type {kind} cannot store")
    return TensorInfo(name, shape, kind, start, math.prod(shape) // block * size)


def kind_of(path: Path, name: str, code: int) -> tuple[str, int, int]:
    """Return a type's name, values per block and bytes per block."""
    if code in KNOWN_TYPES:
        return KNOWN_TYPES[code]
    import gguf

    known = {int(kind): kind for kind in gguf.GGML_QUANT_SIZES}
    if code not in known:
        raise UnsupportedModelError(f"{path}: tensor {name!r} is of type {code}, which is unknown")
    return known[code].name, *gguf.GGML_QUANT_SIZES[known[code]]


def check_inside(info: TensorInfo, end: int) -> None:
    """Refuse a tensor that ends past the file."""
    if info.start + info.size > end:
        raise ValueError(f"tensor {info.name!r} ends at byte {info.start + info.size}, the file at {end}")


def check_kinds(path: Path, tensor_infos: list[TensorInfo]) -> None:
    """Refuse types that cannot be dequantized, before anything is loaded."""
    samples = {info.kind: info.name for info in reversed(tensor_infos)}
    for kind, name in samples.items():
        if not can_dequantize(kind):
            raise UnsupportedModelError(f"{path}: tensor {name!r} is of type {kind}, which cannot be dequantized")
