"""Tensors in a file that is mapped into memory: written whole or not at all, and checked whenever it is opened."""

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
PREAMBLE = struct.Struct("<8sQI4x")  # the magic word, how long the header is, its checksum
LINE = 64  # where tensors begin: a cache line, which is what kernels want
PIECE = 16 << 20  # bytes written at a time
LONGEST_HEADER = 1 << 26
UNFINISHED = "making-"  # what a folder is called in which a file is being written


Buffer = bytes | bytearray | memoryview


class MappedFileError(Exception):
    """Why a file is not used, in words."""


class OutdatedError(MappedFileError):
    """The file is sound, and of something else."""


def write_mapped(path: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors of a CPU into a file. Others see all of it or nothing, and two may do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, start = {}, 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        rows[name] = (kind, tuple(tensor.shape), start, zlib.crc32(_bytes(tensor)))
        start += tensor.nbytes + -tensor.nbytes % LINE
    header = json.dumps({"about": about, "tensors": rows}).encode()
    header += b" " * (-(PREAMBLE.size + len(header)) % LINE)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with draft.open("wb") as file:
            for piece in _in_pieces(
                (PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header)) + header, *_padded(tensors))
            ):
                file.write(piece)
        draft.replace(path)


def _padded(tensors: Mapping[str, torch.Tensor]) -> Iterator[Buffer]:
    for tensor in tensors.values():
        yield _bytes(tensor)
        yield bytes(-tensor.nbytes % LINE)


def _in_pieces(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes in pieces of whole large pages: so the system keeps them in such, and maps them so."""
    waiting = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE):
            waiting += part[at : at + PIECE]
            if len(waiting) >= PIECE:
                yield bytes(waiting[:PIECE])
                del waiting[:PIECE]
    yield waiting


def read_mapped(path: Path, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The file's tensors, which lie in its pages and are not copied; OSError where there is no file."""
    import torch

    with path.open("rb") as file:
        rows, begin = _read_rows(file.read(PREAMBLE.size), file, about)
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory it may write
    with contextlib.suppress(OSError, AttributeError):  # a system that has none
        data.madvise(mmap.MADV_HUGEPAGE)
    found, last = {}, begin
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for name, (kind, shape, start, _) in rows.items():
        dtype = getattr(torch, kind)
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        last = begin + start + nbytes
        if last > size:
            raise MappedFileError("it ends too early")
        found[name] = whole[begin + start : last].view(dtype).view(shape)
    if size != last + -last % LINE:
        raise MappedFileError("it is longer than it should be")
    with ThreadPoolExecutor(usable_cores()) as pool:
        sums = pool.map(lambda tensor: zlib.crc32(_bytes(tensor)), found.values())
        if wrong := [name for name, crc in zip(found, sums, strict=True) if crc != rows[name][3]]:
            raise MappedFileError(f"{wrong[0]!r} is not what was written")
    return found


def read_about(path: Path) -> Any:
    """What a file says it is of."""
    with path.open("rb") as file:
        return _read_header(file.read(PREAMBLE.size), file)["about"]


def abandoned(folder: Path, before: float) -> Iterator[Path]:
    """Folders of those who began to write before that time and did not come to an end."""
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if unfinished.stat().st_mtime < before:
                yield unfinished


def _read_rows(preamble: bytes, file: Any, about: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Name, type, shape, place and checksum of each tensor, and where their places are counted from."""
    header = _read_header(preamble, file)
    if header["about"] != json.loads(json.dumps(about)):
        raise OutdatedError("it was made of other files, or in another way")
    return header["tensors"], file.tell()


def _read_header(preamble: bytes, file: Any) -> Any:
    if len(preamble) < PREAMBLE.size:
        raise MappedFileError("it ends too early")
    magic, length, crc = PREAMBLE.unpack(preamble)
    if magic != MAGIC or length > LONGEST_HEADER:
        raise MappedFileError("it is no file of ours")
    header = file.read(length)
    if zlib.crc32(header) != crc:
        raise MappedFileError("its header is not what was written")
    return json.loads(header)


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
