"""Checks what Hugging Face's library has downloaded: it compares sizes only, while a blob's name is its hash."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

from foretell.errors import ModelError
from foretell.utils.system import home

LOG = logging.getLogger("foretell")
SLACK = 10**9  # nanoseconds by which the clock of a file system may differ
LARGE = 10**9  # bytes whose hashing takes seconds
SHA256, GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@contextlib.contextmanager
def verified(repo: str, revision: str | None) -> Iterator[None]:
    """Hash every blob that is written meanwhile; remove a wrong one and raise ModelError.

    A marker in the cache folder says since when blobs are unchecked. It outlives a process that is killed, so the next
    start checks what that one has downloaded.
    """
    since = time.time_ns() - SLACK
    marker = home() / "fetching" / hashlib.sha256(f"{repo} {revision}".encode()).hexdigest()[:24]
    with contextlib.suppress(OSError):  # where it cannot be written, a killed download is not checked at the next start
        marker.parent.mkdir(parents=True, exist_ok=True)
        if marker.exists():
            since = min(since, marker.stat().st_mtime_ns)
        else:
            marker.touch()
    yield
    check_blobs(repo, since)
    with contextlib.suppress(OSError):
        marker.unlink()


def check_blobs(repo: str, since: int) -> None:
    """Hash the blobs of a repository that were written since then, in nanoseconds."""
    found: dict[Path, int] = {}
    for blob in blobs(repo):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            state = blob.stat()
            if state.st_ctime_ns >= since:
                found[blob] = state.st_size
    if (size := sum(found.values())) >= LARGE:
        LOG.info("verifying the download of %s (%.1f GB)", repo, size / 1e9)
    for blob in found:
        with contextlib.suppress(FileNotFoundError):
            check_blob(repo, blob)


def blobs(repo: str) -> list[Path]:
    """Return the finished downloads of a repository in Hugging Face's cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    found = folder.iterdir() if folder.is_dir() else ()
    return [blob for blob in found if SHA256.fullmatch(blob.name) or GIT_SHA1.fullmatch(blob.name)]


def check_blob(repo: str, blob: Path) -> None:
    """Compare a blob with its name: the SHA-256 of a large file, Git's hash of a small one."""
    with blob.open("rb") as content:
        if SHA256.fullmatch(blob.name):
            found = hashlib.file_digest(content, "sha256").hexdigest()
        else:
            data = content.read()
            found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if found != blob.name:
        blob.unlink(missing_ok=True)
        raise ModelError(f"{repo}: a download has the hash {found}, not {blob.name}; it was removed, so try again")
