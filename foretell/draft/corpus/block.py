"""Files with the index over their tokens, and their copy in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.hub.mapped_file import (
    MappedFileError,
    OutdatedError,
    read_about,
    read_mapped,
    unfinished_folders,
    write_mapped,
)
from foretell.utils.private_files import is_private_file, make_private
from foretell.utils.system import home

from .context_index import ContextArrays, ContextIndex, Int32

LOG = logging.getLogger("foretell")
FORMAT = 1  # of the stored file; raised when files of another version must not be read
ABANDONED_SECONDS = 24 * 3600.0  # age from which an unfinished file has no writer any more


@dataclass(frozen=True)
class IndexedFile:
    """A file as it was indexed."""

    path: str
    size: int
    mtime_ns: int
    digest: str
    start: int  # of its tokens in the block
    length: int  # tokens


@dataclass(frozen=True, eq=False)
class IndexBlock:
    """Files and the index over their tokens."""

    files: tuple[IndexedFile, ...]
    arrays: ContextArrays

    @classmethod
    def build(cls, files: Iterable[tuple[str, int, int, str]], documents: Sequence[Int32]) -> IndexBlock:
        """Index the tokens of files, given with path, size, modification time and digest."""
        starts = np.cumsum([0, *(len(tokens) + 1 for tokens in documents)])  # a separator follows each
        indexed = [
            IndexedFile(*file, int(start), len(tokens))
            for file, start, tokens in zip(files, starts, documents, strict=False)
        ]
        return cls(tuple(indexed), ContextArrays.build(documents))

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The digest of each file by path."""
        return {file.path: file.digest for file in self.files}

    @cached_property
    def by_path(self) -> Mapping[str, IndexedFile]:
        return {file.path: file for file in self.files}

    def tokens(self, path: str) -> Int32:
        """Return the tokens of a file."""
        file = self.by_path[path]
        return self.arrays.tokens[file.start : file.start + file.length]

    def index(self, gone: Set[str] = frozenset()) -> ContextIndex:
        """Return the index without the files `gone`."""
        stale = frozenset(number for number, file in enumerate(self.files) if file.path in gone)
        return ContextIndex(self.arrays, [file.start for file in self.files], stale)

    def __len__(self) -> int:
        return len(self.arrays.tokens)


@dataclass(frozen=True)
class BlockStore:
    """The file in the cache folder that keeps a block until the next start."""

    tokenizer: str  # digest
    roots: tuple[str, ...]

    @property
    def path(self) -> Path:
        name = hashlib.sha256(repr((self.tokenizer, self.roots)).encode()).hexdigest()[:24]
        return corpus_folder() / f"{name}.index"

    def _about(self) -> dict[str, Any]:
        return {"format": FORMAT, "tokenizer": self.tokenizer, "roots": self.roots}

    def load(self) -> IndexBlock | None:
        """Return the stored block, mapped from the file; None if there is none that can be used. Log the reason."""
        path = self.path
        try:
            if not is_private_file(path):
                raise MappedFileError("it is a link, or other users can write it")
            block = _restore(read_mapped(path, self._about()))
        except FileNotFoundError:
            return None
        except OutdatedError as error:
            LOG.info("%s is outdated and is written again: %s", path, error)
        except (MappedFileError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            LOG.warning("%s cannot be used, so the draft corpus is indexed again: %s", path, error)
        else:
            return block
        return None

    def save(self, block: IndexBlock) -> None:
        """Write a block. On failure log a warning; the next start indexes the files again."""
        files = np.frombuffer(json.dumps([astuple(file) for file in block.files]).encode(), dtype=np.uint8)
        arrays = {"files": files, "tokens": block.arrays.tokens, "contexts": block.arrays.contexts}
        arrays["order"] = block.arrays.order
        try:
            make_private(corpus_folder(), hidden=True)  # it has the text of files that others may not read
            tensors = {name: torch.from_numpy(np.require(array, requirements="W")) for name, array in arrays.items()}
            write_mapped(self.path, self._about(), tensors)
        except OSError as error:
            reason = error.strerror or error
            LOG.warning("%s cannot be written, so the next start indexes the draft corpus again: %s", self.path, reason)
        remove_stale_files(corpus_folder())


def _restore(tensors: Mapping[str, torch.Tensor]) -> IndexBlock:
    """Return the block of these tensors; raise if they do not fit each other."""
    held = {name: tensor.numpy() for name, tensor in tensors.items()}
    arrays = ContextArrays(held["tokens"], held["contexts"], held["order"])
    kinds = [array.dtype.name for array in (arrays.tokens, arrays.contexts, arrays.order)]
    if kinds != ["int32", "uint8", "int32"]:
        raise ValueError(f"its arrays have the types {', '.join(kinds)}")
    arrays.check()
    files = tuple(IndexedFile(*file) for file in json.loads(held["files"].tobytes()))
    end = 0
    for file in files:
        if file.start != end or file.length < 0:
            raise ValueError(f"the tokens of {file.path} are not where they should be")
        end = file.start + file.length + 1
    if end != len(arrays.tokens):
        raise ValueError("it has tokens of no file")
    return IndexBlock(files, arrays)


def corpus_folder() -> Path:
    """Return the folder of stored blocks. It can be deleted: the next start indexes the files again."""
    return home() / "draft-corpus"


def remove_stale_files(folder: Path) -> None:
    """Remove blocks of folders that no longer exist, and files that were never finished."""
    for unfinished in unfinished_folders(folder, time.time() - ABANDONED_SECONDS):
        shutil.rmtree(unfinished, ignore_errors=True)
    for file in folder.glob("*.index"):
        try:
            if not any(Path(root).exists() for root in read_about(file)["roots"]):
                file.unlink()
        except (MappedFileError, OSError, KeyError, TypeError):
            continue  # the next `load` of that file reports what is wrong with it
