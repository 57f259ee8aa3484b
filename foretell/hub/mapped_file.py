"""Tensors in a memory-mapped file, written atomically and verified on every open."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.utils.system import usable_cores

if TYPE_CHECKING:
    import torch

MAGIC = b"foretell"
PREAMBLE = struct.Struct("<8sQI4x")  # magic, length of the header, its CRC-32
ALIGNMENT = 64  # bytes; tensors begin at a cache line, as the kernels need
WRITE_BYTES = 16 << 20  # bytes per write, a multiple of huge pages
MAX_HEADER_BYTES = 1 << 26
UNFINISHED_PREFIX = "making-"  # of the folder in which a file is being written


Buffer = bytes | bytearray | memoryview


class MappedFileError(Exception):
    """The file cannot be used; the message says why."""


class OutdatedError(MappedFileError):
    """The file is intact but was made from other sources."""


def write_mapped(path: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to a file atomically; concurrent writers do not interfere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, start = {}, 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        rows[name] = (kind, tuple(tensor.shape), start, zlib.crc32(_bytes(tensor)))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    header = json.dumps({"about": about, "tensors": rows}).encode()
    header += b" " * (-(PREAMBLE.size + len(header)) % ALIGNMENT)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED_PREFIX, dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        with unfinished.open("wb") as file:
            for chunk in _in_chunks(
                (PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header)) + header, *_padded(tensors))
            ):
                file.write(chunk)
        unfinished.replace(path)


def _padded(tensors: Mapping[str, torch.Tensor]) -> Iterator[Buffer]:
    for tensor in tensors.values():
        yield _bytes(tensor)
        yield bytes(-tensor.nbytes % ALIGNMENT)


def _in_chunks(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes in chunks of whole huge pages, so that the page cache can map them as huge pages."""
    waiting = bytearray()
    for part in parts:
        for at in range(0, len(part), WRITE_BYTES):
            waiting += part[at : at + WRITE_BYTES]
            if len(waiting) >= WRITE_BYTES:
                yield bytes(waiting[:WRITE_BYTES])
                del waiting[:WRITE_BYTES]
    yield waiting


def read_mapped(path: Path, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the file's tensors without copying; raise OSError if there is no file."""
    import torch

    with path.open("rb") as file:
        rows, begin = _read_rows(file.read(PREAMBLE.size), file, about)
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch needs writable memory
    with contextlib.suppress(OSError, AttributeError):  # not supported by the system
        data.madvise(mmap.MADV_HUGEPAGE)
    found, last = {}, begin
    data_bytes = torch.frombuffer(data, dtype=torch.uint8)
    for name, (kind, shape, start, _) in rows.items():
        dtype = getattr(torch, kind)
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        last = begin + start + nbytes
        if last > size:
            raise MappedFileError("it is truncated")
        found[name] = data_bytes[begin + start : last].view(dtype).view(shape)
    if size != last + -last % ALIGNMENT:
        raise MappedFileError("it is longer than it should be")
    with ThreadPoolExecutor(usable_cores()) as pool:
        sums = pool.map(lambda tensor: zlib.crc32(_bytes(tensor)), found.values())
        if wrong := [name for name, crc in zip(found, sums, strict=True) if crc != rows[name][3]]:
            raise MappedFileError(f"{wrong[0]!r} has a wrong checksum")
    return found


def read_about(path: Path) -> Any:
    """Return the description a file was written with."""
    with path.open("rb") as file:
        return _read_header(file.read(PREAMBLE.size), file)["about"]


def unfinished_folders(folder: Path, before: float) -> Iterator[Path]:
    """Yield the folders of writes that began before `before` and did not finish."""
    for unfinished in folder.glob(f"{UNFINISHED_PREFIX}*"):
        with contextlib.suppress(OSError):
            if unfinished.stat().st_mtime < before:
                yield unfinished


def _read_rows(preamble: bytes, file: Any, about: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return dtype, shape, offset and checksum of each tensor, and the base of the offsets."""
    header = _read_header(preamble, file)
    if header["about"] != json.loads(json.dumps(about)):
        raise OutdatedError("it was made from other files or settings")
    return header["tensors"], file.tell()


def _read_header(preamble: bytes, file: Any) -> Any:
    if len(preamble) < PREAMBLE.size:
        raise MappedFileError("it is truncated")
    magic, length, crc = PREAMBLE.unpack(preamble)
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise MappedFileError("it has another format")
    header = file.read(length)
    if zlib.crc32(header) != crc:
        raise MappedFileError("its header has a wrong checksum")
    return json.loads(header)


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
