"""Files that only this user can have written: those of the cache folder that are trusted when they are read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ACCESS = stat.S_IRWXG | stat.S_IRWXO


def make_private(folder: Path, hidden: bool = False) -> None:
    """Create the folder and make it writable, or with `hidden` accessible, by its owner only.

    Raise PermissionError if it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not is_trusted_owner(found):
        message = "belongs to another user, so nothing is loaded from it; set FORETELL_HOME to a folder of your own"
        raise PermissionError(errno.EPERM, message, str(folder))
    forbidden = OTHERS_ACCESS if hidden else OTHERS_WRITE
    if found.st_mode & forbidden:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~forbidden)


def is_private_file(path: Path) -> bool:
    """Return whether this is a regular file, no link, that no other user can write; raise OSError if it is missing."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and is_trusted_owner(found) and not found.st_mode & OTHERS_WRITE


def is_trusted_owner(found: os.stat_result) -> bool:
    """Return whether a file belongs to this user, or to root, as in a container image."""
    return found.st_uid in (0, os.geteuid())
