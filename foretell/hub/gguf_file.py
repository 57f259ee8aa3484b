"""A GGUF file: its metadata and where each tensor lies. The gguf package takes seconds to read a vocabulary."""

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
from foretell.hub.gguf_dequant import OWN, can_decode, decode
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NESTING = 4
LENGTH = struct.Struct("<Q")
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file, mapped into memory."""

    path: Path
    metadata: Mapping[str, Any]
    places: tuple[Place, ...]
    data: mmap.mmap = field(repr=False)

    def tensors(self) -> dict[str, LazyTensor]:
        """The tensors by name."""
        return {
            place.name: LazyTensor(place.name, place.shape, partial(self.read, place), partial(self.read_rows, place))
            for place in self.places
        }

    def read(self, place: Place) -> torch.Tensor:
        """One tensor's values."""
        import numpy as np

        raw = np.frombuffer(self.data, dtype=np.uint8, count=place.size, offset=place.start)
        return decode(raw, place.kind, place.shape)

    def read_rows(self, place: Place, start: int, stop: int) -> torch.Tensor:
        """The values of some rows; each row is whole blocks."""
        row, (rows, *rest) = place.size // place.shape[0], place.shape
        start, stop, _ = slice(start, stop).indices(rows)
        some = Place(place.name, (stop - start, *rest), place.kind, place.start + start * row, (stop - start) * row)
        return self.read(some)


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file whose header is sound and whose tensors all lie inside it, or say what is wrong."""
    try:
        data = map_file(path)
        cursor = Cursor(data)
        tensor_count, value_count = read_preamble(path, cursor)
        metadata = read_metadata(cursor, value_count)
        check_split(path, metadata)
        places = read_places(path, cursor, tensor_count, alignment(metadata))
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path}: damaged GGUF file: {error}; fetch it again") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return GgufFile(path, metadata, places, data)


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes. A private map: torch wants memory it may write."""
    with path.open("rb") as handle:
        if handle.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path}: not a GGUF file; name a .gguf file, or a folder with *.safetensors")
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)


class Cursor:
    """Reads values one after another, and never past the end."""

    def __init__(self, data: mmap.mmap, position: int = len(MAGIC)) -> None:
        self.data = data
        self.position = position

    def take(self, size: int) -> int:
        """Step over `size` bytes; gives where they begin."""
        start = self.position
        if size > len(self.data) - start:
            raise ValueError("it ends inside its header")
        self.position = start + size
        return start

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """`count` numbers of one kind."""
        size = struct.calcsize("<" + code) * count
        return struct.unpack_from(f"<{count}{code}", self.data, self.take(size))

    def number(self, code: str) -> Any:
        """One number."""
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        """One string."""
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """`count` strings; a tight loop, for vocabularies have hundreds of thousands."""
        data, position, texts = self.data, self.position, []
        last = len(data) - LENGTH.size
        for _ in range(count):
            if position > last:
                raise ValueError("it ends inside its header")
            begin = position + LENGTH.size
            position = begin + LENGTH.unpack_from(data, position)[0]
            texts.append(data[begin:position].decode())
        self.take(position - self.position)
        return texts

    def value(self, kind: int, nesting: int = 0) -> Any:
        """A value of the kind the file says it is of."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind == ARRAY and nesting < MAX_NESTING:
            return self.array(nesting + 1)
        raise ValueError(f"no value is of kind {kind} at byte {self.position}")

    def array(self, nesting: int) -> list[Any]:
        """A list of values of one kind."""
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        if kind == TEXT:
            return self.texts(count)
        return [self.value(kind, nesting) for _ in range(count)]


def read_preamble(path: Path, cursor: Cursor) -> tuple[int, int]:
    """How many tensors and how many metadata values follow."""
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path}: a big-endian GGUF file; convert it to little-endian")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{path}: GGUF version {version}; versions 2 and 3 are read, convert it anew")
    return cursor.number("Q"), cursor.number("Q")


def read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    """The metadata as plain values."""
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key, kind = cursor.text(), cursor.number("I")
        if key in metadata:
            raise ValueError(f"it has {key!r} twice")
        metadata[key] = cursor.value(kind)
    return metadata


def check_split(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse one file of several: the others' tensors would be missing."""
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(f"{path}: one of {count} files; join them with `llama-gguf-split --merge`")


def alignment(metadata: Mapping[str, Any]) -> int:
    """To what multiple the tensors' data are moved up."""
    size = metadata.get("general.alignment", 32)
    if not isinstance(size, int) or size < 1 or size & (size - 1):
        raise ValueError(f"general.alignment is {size!r}, not a power of two")
    return size


def read_places(path: Path, cursor: Cursor, count: int, aligned: int) -> tuple[Place, ...]:
    """Where each tensor lies, all of it inside the file, each of a kind that can be read."""
    places: dict[str, Place] = {}
    for _ in range(count):
        place = read_place(path, cursor)
        if place.name in places:
            raise ValueError(f"it has tensor {place.name!r} twice")
        places[place.name] = place
    base = -(-cursor.position // aligned) * aligned
    moved = [Place(p.name, p.shape, p.kind, base + p.start, p.size) for p in places.values()]
    for place in moved:
        check_inside(place, len(cursor.data))
    check_kinds(path, moved)
    return tuple(moved)


def read_place(path: Path, cursor: Cursor) -> Place:
    """One tensor's place, counted from where the data begin."""
    name, dimensions = cursor.text(), cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    # GGUF names the fastest dimension first, torch last.
    shape = cursor.numbers("Q", dimensions)[::-1]
    code, start = cursor.number("I"), cursor.number("Q")
    kind, block, size = kind_of(path, name, code)
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, which {kind} cannot have")
    return Place(name, shape, kind, start, math.prod(shape) // block * size)


def kind_of(path: Path, name: str, code: int) -> tuple[str, int, int]:
    """The kind's name, and how many values a block has in how many bytes."""
    if code in OWN:
        return OWN[code]
    import gguf

    known = {int(kind): kind for kind in gguf.GGML_QUANT_SIZES}
    if code not in known:
        raise UnsupportedModelError(f"{path}: tensor {name!r} is of type {code}, which is not known here")
    return known[code].name, *gguf.GGML_QUANT_SIZES[known[code]]


def check_inside(place: Place, end: int) -> None:
    """Refuse a tensor whose data are cut off."""
    if place.start + place.size > end:
        raise ValueError(f"tensor {place.name!r} ends at byte {place.start + place.size}, the file at {end}")


def check_kinds(path: Path, places: list[Place]) -> None:
    """Refuse kinds that cannot be decoded, before anything is loaded."""
    samples = {place.kind: place.name for place in reversed(places)}
    for kind, name in samples.items():
        if not can_decode(kind):
            raise UnsupportedModelError(f"{path}: tensor {name!r} is of type {kind}, which cannot be decoded here")
