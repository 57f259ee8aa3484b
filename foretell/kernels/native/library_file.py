"""The file of a compiled library: written whole, checked before it is loaded, and trusted only from its owner.

Loading a library runs its code, and half a library ends the process with SIGBUS. So each has its SHA-256 next to it,
in the format of `sha256sum`, and neither file nor folder may be writable by other users.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create the folder; PermissionError where it belongs to another user, or where others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not _ours(found):
        message = "belongs to another user, so no library is loaded from it; point FORETELL_HOME at a folder of yours"
        raise PermissionError(errno.EPERM, message, str(folder))
    if found.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)


def is_whole(path: Path) -> bool:
    """Return whether the library is there, belongs to this user, and has the checksum that was written with it."""
    try:
        for file in (path, checksum_file(path)):
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode) or not _ours(found) or found.st_mode & OTHERS_WRITE:
                return False
        return checksum_file(path).read_text() == _checksum(path, path.name)
    except (OSError, UnicodeDecodeError):
        return False


def _ours(found: os.stat_result) -> bool:
    """Return whether a file belongs to this user, or to root as in an image that was built for others."""
    return found.st_uid in (0, os.geteuid())


def checksum_file(path: Path) -> Path:
    """Return where the checksum of a library is."""
    return path.with_name(path.name + ".sha256")


def _checksum(path: Path, name: str) -> str:
    with path.open("rb") as content:
        return f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {name}\n"


def install(draft: Path, path: Path) -> None:
    """Give a compiled library its name, with its checksum, once both are on the disk."""
    checksum = draft.with_name("checksum")
    checksum.write_text(_checksum(draft, path.name))
    for file, mode in ((draft, 0o755), (checksum, 0o644)):
        file.chmod(mode)
        _sync(file)
    checksum.replace(checksum_file(path))
    draft.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
