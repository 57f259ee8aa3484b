"""Checks what Hugging Face's library has downloaded: it compares sizes only, while a blob's name is its hash."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from foretell.errors import ModelError
from foretell.system import home

SHA256, GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@contextlib.contextmanager
def verified(repo: str, revision: str | None) -> Iterator[None]:
    """Hash every blob that is written meanwhile; remove a wrong one and raise ModelError.

    A marker in the cache folder says since when blobs are unchecked. It outlives a process that is killed, so the next
    start checks what that one has downloaded.
    """
    marker = home() / "fetching" / hashlib.sha256(f"{repo} {revision}".encode()).hexdigest()[:24]
    with contextlib.suppress(OSError):  # a cache that cannot be written: then nothing is downloaded either
        marker.parent.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            marker.touch()
    yield
    if not marker.exists():
        return
    since = marker.stat().st_mtime_ns
    for blob in blobs(repo):
        if blob.stat().st_ctime_ns >= since:
            check_blob(repo, blob)
    with contextlib.suppress(OSError):
        marker.unlink()


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
        blob.unlink()
        raise ModelError(f"{repo}: a download has the hash {found}, not {blob.name}; it was removed, so try again")
