"""Resolution of a model name to its files: built-in, local path or Hugging Face id."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from foretell.errors import ForetellError, ModelError, RequestError, UnknownModelError
from foretell.hub import huggingface
from foretell.hub.catalog import BUILTINS
from foretell.hub.checkpoint import check_folder
from foretell.hub.fetch import fetch
from foretell.hub.gguf_file import MAGIC
from foretell.options import nearest

FORMS = (
    "a model is a built-in name, a folder with config.json and *.safetensors, a .gguf file, "
    "or a Hugging Face id: owner/repo, owner/repo/file.gguf, or owner/repo:Q4_K_M"
)
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,200}")
REPO_TAG = re.compile(rf"({REPO.pattern}):([\w.-]+)")
HUB_HOSTS = ("hf.co/", "huggingface.co/", "https://huggingface.co/")  # prefixes of ids, as Ollama takes them
LATEST = "latest"  # tag of the file in the usual quantization, or of the first
USUAL_QUANTIZATION = "Q4_K_M"
REPO_FILE = re.compile(rf"({REPO.pattern}?)[:/]((?:\w[\w. -]*/)*\w[\w. +-]*\.gguf)")


def log_stderr(message: str) -> None:
    """Print a progress line on standard error."""
    print(message, file=sys.stderr)


def resolve(name: str, say: Callable[[str], None] = log_stderr, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a name; download it if needed. A built-in name precedes a path.

    `revision` is a branch, a tag or a commit of a Hugging Face repository.
    """
    if not name.strip():
        raise RequestError("model", f"is empty; {FORMS}")
    check_revision(name, revision)
    if name in BUILTINS:
        return fetch(BUILTINS[name], say)
    path = Path(os.path.expanduser(name))
    # Unlike the methods of Path, these accept any string as a name.
    if os.path.isdir(path):
        check_folder(path)
        return path
    if os.path.isfile(path):
        return checked_file(path)
    return from_hub(name, revision)


def check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision for a model without revisions, and a malformed one."""
    if revision is None:
        return
    if name in BUILTINS:
        raise RequestError("revision", f"{name} is a built-in model, pinned by its hash; leave the revision out")
    if os.path.exists(os.path.expanduser(name)):
        raise RequestError("revision", f"{name} is a local path; only a Hugging Face id has revisions")
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise RequestError("revision", f"must be a branch, a tag or a commit, not {revision!r}")


def checked_file(path: Path) -> Path:
    """Return the path if it is a GGUF file."""
    if path.suffix == ".gguf" or begins_as_gguf(path):
        return path
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: a weights file only; name the folder that also has config.json")
    raise ModelError(f"{path}: not a model; {FORMS}")


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file is GGUF by content: some programs name them by a hash."""
    try:
        with path.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def from_hub(name: str, revision: str | None = None) -> Path:
    """Return the files of a Hugging Face id."""
    for host in HUB_HOSTS:
        name = name.removeprefix(host)
    if one := REPO_FILE.fullmatch(name):
        return huggingface.single_file(one[1], one[2], revision)
    if one := REPO_TAG.fullmatch(name):
        return huggingface.single_file(one[1], tagged_file(one[1], one[2], revision), revision)
    if not REPO.fullmatch(name) or name.endswith(".gguf"):
        raise UnknownModelError(f"no model {name!r}; {nearest(name.lower(), BUILTINS)}; {FORMS}")
    folder = huggingface.snapshot(name, revision)
    try:
        check_folder(folder)
    except ModelError as error:
        raise explain_folder_error(name, error, revision) from error
    return folder


def tagged_file(repo: str, tag: str, revision: str | None = None) -> str:
    """Return the GGUF file of a repository in the quantization `tag`, such as Q4_K_M or latest."""
    names = [name for name in huggingface.gguf_names(repo, revision) if "mmproj" not in name.lower()]
    if not names:
        raise UnknownModelError(f"{repo}: has no GGUF file; name it without :{tag}")
    wanted = USUAL_QUANTIZATION if tag == LATEST else tag
    found = [name for name in names if re.search(rf"[-._]{re.escape(wanted)}([-.]\d+-of-\d+)?\.gguf$", name, re.I)]
    if not found and tag != LATEST:
        raise UnknownModelError(f"{repo}: has no GGUF file in {tag}; name one, as {repo}/FILE: {', '.join(names)}")
    return (found or names)[0]


def explain_folder_error(repo: str, error: ModelError, revision: str | None = None) -> ForetellError:
    """Return the error for a repository that is no model folder; often one of its GGUF files must be named."""
    try:
        names = huggingface.gguf_names(repo, revision)
    except ForetellError:
        names = []
    if names:
        return ModelError(f"{repo}: has GGUF files; name one, as {repo}:Q4_K_M or {repo}/FILE: {', '.join(names)}")
    return type(error)(f"{repo}: {str(error).partition(': ')[2]}")
