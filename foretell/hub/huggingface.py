"""Models from Hugging Face, in its own cache, with verified downloads."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import CapacityError, ForetellError, ModelError, UnknownModelError
from foretell.utils.system import home

LOG = logging.getLogger("foretell")
CLOCK_SLACK = 10**9  # nanoseconds by which a file system's clock may differ
LOGGED_BYTES = 10**9  # hashing this much takes seconds, so it is logged
SHA256, GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@contextlib.contextmanager
def verified(repo: str, revision: str | None) -> Iterator[None]:
    """Verify the hash of every blob written inside the context; remove a wrong one and raise ModelError.

    Hugging Face's library compares sizes only, while a blob's name is its hash. A marker file records since when
    blobs are unverified; after a killed process, the next start verifies what that one downloaded.
    """
    since = time.time_ns() - CLOCK_SLACK
    marker = home() / "fetching" / hashlib.sha256(f"{repo} {revision}".encode()).hexdigest()[:24]
    with contextlib.suppress(OSError):  # without it, a killed download is not verified at the next start
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
    """Verify the blobs of a repository written since `since`, in nanoseconds."""
    found: dict[Path, int] = {}
    for blob in blobs(repo):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            state = blob.stat()
            if state.st_ctime_ns >= since:
                found[blob] = state.st_size
    if (size := sum(found.values())) >= LOGGED_BYTES:
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
    """Compare a blob's hash with its name: SHA-256 for a large file, Git's SHA-1 for a small one."""
    with blob.open("rb") as content:
        if SHA256.fullmatch(blob.name):
            found = hashlib.file_digest(content, "sha256").hexdigest()
        else:
            data = content.read()
            found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if found != blob.name:
        blob.unlink(missing_ok=True)
        raise ModelError(f"{repo}: a download has the hash {found}, not {blob.name}; it was removed, so try again")


WANTED = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "*quant*_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.safetensors",
    "model.safetensors.index.json",
)
# Copies of the same weights in other formats.
UNWANTED = ("*/*", "consolidated*")
# A name reaches Hugging Face only if no local folder or file has it.
NOT_HERE = "no such local folder or file"
# The first match counts: a gated repository is also one not found, an offline cache also an entry not found.
REMEDIES = {
    "ModuleNotFoundError": "downloading from Hugging Face needs its library: `pip install huggingface_hub`",
    "GatedRepoError": "access is gated; accept the terms on its page, then log in with `hf auth login`",
    "RepositoryNotFoundError": f"{NOT_HERE}, and no such repository on Hugging Face, or a private one: "
    "log in with `hf auth login`",
    "RevisionNotFoundError": "the repository has no such revision; name a branch, a tag or a commit of it",
    "OfflineModeIsEnabled": f"{NOT_HERE}, nor in the cache, and HF_HUB_OFFLINE forbids downloads; "
    "unset it, or name a folder",
    "RemoteEntryNotFoundError": "no such file in the repository; look at its page for the right name",
    "LocalEntryNotFoundError": f"{NOT_HERE}, nor in the cache, and Hugging Face cannot be reached; "
    "check the network or name a folder",
    "TransportError": f"{NOT_HERE}, and Hugging Face cannot be reached; check the network or name a folder",
    "HTTPError": "Hugging Face gave an unexpected answer; check the network and try again",
    "HFValidationError": "not a Hugging Face id; one looks like owner/repo",
}
# Errors for which the name is at fault.
UNKNOWN = ("RepositoryNotFoundError", "RemoteEntryNotFoundError", "HFValidationError")


def snapshot(repo: str, revision: str | None = None, patterns: Sequence[str] = WANTED) -> Path:
    """Return the folder of a repository's config, tokenizer and safetensors; download it if needed."""
    with user_errors(repo, revision):
        from huggingface_hub import snapshot_download

        allowed, ignored = list(patterns), list(UNWANTED)
        with verified(repo, revision):
            return Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))


def single_file(repo: str, name: str, revision: str | None = None) -> Path:
    """Return one file of a repository; download it if needed."""
    with user_errors(f"{repo}/{name}", revision):
        from huggingface_hub import hf_hub_download

        with verified(repo, revision):
            return Path(hf_hub_download(repo, name, revision=revision))


def gguf_names(repo: str, revision: str | None = None) -> list[str]:
    """Return the names of the GGUF files of a repository; without a network those in the cache."""
    try:
        with user_errors(repo, revision):
            from huggingface_hub import list_repo_files

            return sorted(name for name in list_repo_files(repo, revision=revision) if name.endswith(".gguf"))
    except ModelError:
        if found := cached_gguf_names(repo):
            return found
        raise


def cached_gguf_names(repo: str) -> list[str]:
    """Return the names of the GGUF files of a repository in Hugging Face's cache."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    found = (file for snapshot in snapshots.glob("*") for file in snapshot.rglob("*.gguf"))
    return sorted({"/".join(file.parts[len(snapshots.parts) + 1 :]) for file in found})


@dataclass(frozen=True)
class CachedRepo:
    """A cached repository; `folder` has the files of its latest revision."""

    name: str
    folder: Path
    size: int


def cached_repos() -> list[CachedRepo]:
    """Return the cached model repositories with a config.json, sorted by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return []
    models = [model for repo in repos if repo.repo_type == "model" for model in cached_revisions(repo)]
    return sorted(models, key=lambda model: model.name)


def cached_revisions(repo: Any) -> list[CachedRepo]:
    """Return the latest revision with a config.json, if any."""
    complete = [one for one in repo.revisions if "config.json" in {file.file_name for file in one.files}]
    latest = sorted(complete, key=lambda one: float(one.last_modified))[-1:]
    return [CachedRepo(repo.repo_id, Path(one.snapshot_path), repo.size_on_disk) for one in latest]


@contextmanager
def user_errors(what: str, revision: str | None = None) -> Iterator[None]:
    """Convert errors of Hugging Face's library to one line with a remedy."""
    try:
        yield
    except ForetellError:
        raise
    # The library's errors and those of its HTTP client have no common base class.
    except Exception as error:
        raise explain(what if revision is None else f"{what} at {revision}", error) from error


def explain(what: str, error: Exception) -> ForetellError:
    """Return the error with its remedy."""
    names = {kind.__name__ for cause in (error, error.__cause__) for kind in type(cause).__mro__}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"the disk is full, downloading {what}; free some, or point HF_HOME at another disk")
    for name, remedy in REMEDIES.items():
        if name in names:
            return (UnknownModelError if name in UNKNOWN else ModelError)(f"{what}: {remedy}")
    return ModelError(f"{what}: Hugging Face reports: {' '.join(str(error).split())[:300]}")
