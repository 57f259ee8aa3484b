"""Finds and reads the text files below the folders that an operator named. No link is followed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .gitignore import IgnoreRules, parse_rules

MAX_FILE_BYTES = 1 << 20  # a larger file is data, or generated
MAX_FILES = 50_000
MAX_DEPTH = 64  # nested folders
IGNORE_FILE = ".gitignore"
# Neither a link nor a pipe is opened, and no terminal is taken over.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class FileState:
    """A file, and what changes when it is written."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FileContent:
    """The content of a file; `text` is None if it is no text."""

    digest: str
    text: str | None


def find_files(root: Path) -> list[FileState]:
    """Return the files below a folder, or the file itself, that may be text.

    Left out are hidden files and folders (.git, .env), what a .gitignore inside the folder names, links, and files
    larger than MAX_FILE_BYTES. Raise OSError if the root cannot be read.
    """
    found = os.lstat(root)
    if stat.S_ISREG(found.st_mode):
        return [_state(str(root), found)]
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is neither a file nor a folder", str(root))
    os.close(os.open(root, OPEN_FLAGS))  # `fwalk` would not report that it cannot be read
    files: list[FileState] = []
    for state in _walk(root):
        files.append(state)
        if len(files) > MAX_FILES:
            break
    return files


def _walk(root: Path) -> Iterator[FileState]:
    inherited = {str(root): IgnoreRules()}
    for folder, folders, names, handle in os.fwalk(root, follow_symlinks=False):
        parts = Path(folder).relative_to(root).parts
        rules = inherited.pop(folder)
        if IGNORE_FILE in names:
            rules = rules.within(len(parts), parse_rules(_read_rules(handle)))
        kept = [name for name in sorted(folders) if _is_wanted(name) and not rules.ignores((*parts, name), True)]
        folders[:] = kept if len(parts) < MAX_DEPTH else []
        inherited |= {os.path.join(folder, name): rules for name in folders}
        for name in sorted(names):
            if _is_wanted(name) and not rules.ignores((*parts, name), False):
                with contextlib.suppress(OSError):  # removed since
                    found = os.stat(name, dir_fd=handle, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE_BYTES:
                        yield _state(os.path.join(folder, name), found)


def _is_wanted(name: str) -> bool:
    """Return whether a name is not hidden, and is text that a cache can store."""
    return not name.startswith(".") and name.isprintable()


def _state(path: str, found: os.stat_result) -> FileState:
    return FileState(path, found.st_size, found.st_mtime_ns)


def _read_rules(folder: int) -> str:
    try:
        with os.fdopen(os.open(IGNORE_FILE, OPEN_FLAGS, dir_fd=folder), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_file(root: Path, path: str) -> FileContent:
    """Return the content of a file found below a root; raise OSError if it cannot be read.

    Each folder on the way is opened without following links, so one that was put there since leads nowhere.
    """
    with contextlib.ExitStack() as opened:
        handle: int | None = None
        parts = Path(path).relative_to(root).parts
        for part in (str(root), *parts[:-1]) if parts else ():
            handle = os.open(part, OPEN_FLAGS | os.O_DIRECTORY, dir_fd=handle)
            opened.callback(os.close, handle)
        with os.fdopen(os.open(parts[-1] if parts else path, OPEN_FLAGS, dir_fd=handle), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "is no regular file", path)
            data = file.read(MAX_FILE_BYTES + 1)
    return FileContent(hashlib.sha256(data).hexdigest(), _text(data))


def _text(data: bytes) -> str | None:
    """Return the text of a file; None if it is binary, not UTF-8, or too large."""
    if len(data) > MAX_FILE_BYTES or b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
