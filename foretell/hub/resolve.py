"""From the name of a model to its files."""

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
    "or a Hugging Face id: owner/repo, or owner/repo/file.gguf"
)
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,200}")
REPO_FILE = re.compile(rf"({REPO.pattern}?)[:/]((?:\w[\w. -]*/)*\w[\w. +-]*\.gguf)")


def tell(message: str) -> None:
    """Say what is going on, beside the output."""
    print(message, file=sys.stderr)


def resolve(name: str, say: Callable[[str], None] = tell, revision: str | None = None) -> Path:
    """Return the folder or GGUF file that a name means, fetched if need be. A built-in name goes before a path.

    `revision` is a branch, a tag or a commit of a Hugging Face repository.
    """
    if not name.strip():
        raise RequestError("model", f"is empty; {FORMS}")
    check_revision(name, revision)
    if name in BUILTINS:
        return fetch(BUILTINS[name], say)
    path = Path(os.path.expanduser(name))
    # Unlike the methods of Path, these take any text for a name.
    if os.path.isdir(path):
        check_folder(path)
        return path
    if os.path.isfile(path):
        return checked_file(path)
    return from_hub(name, revision)


def check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision of a model that has none, and one that cannot be right."""
    if revision is None:
        return
    if name in BUILTINS:
        raise RequestError("revision", f"{name} is built in and pinned by its hash; leave the revision out")
    if os.path.exists(os.path.expanduser(name)):
        raise RequestError("revision", f"{name} is on this disk; only a Hugging Face id has revisions")
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise RequestError("revision", f"must be a branch, a tag or a commit, not {revision!r}")


def checked_file(path: Path) -> Path:
    """The path, if it is that of a GGUF file."""
    if path.suffix == ".gguf" or begins_as_gguf(path):
        return path
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: weights alone; name the folder that has config.json beside them")
    raise ModelError(f"{path}: not a model; {FORMS}")


def begins_as_gguf(path: Path) -> bool:
    """Whether a file is GGUF by content: some programs keep them under a hash."""
    try:
        with path.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def from_hub(name: str, revision: str | None = None) -> Path:
    """Return the files of a Hugging Face id."""
    if one := REPO_FILE.fullmatch(name):
        return huggingface.single_file(one[1], one[2], revision)
    if not REPO.fullmatch(name) or name.endswith(".gguf"):
        raise UnknownModelError(f"no model {name!r}; {nearest(name.lower(), BUILTINS)}; {FORMS}")
    folder = huggingface.snapshot(name, revision)
    try:
        check_folder(folder)
    except ModelError as error:
        raise better_words(name, error, revision) from error
    return folder


def better_words(repo: str, error: ModelError, revision: str | None = None) -> ForetellError:
    """Why a repository's folder does not do: often it has GGUF files, of which one must be named."""
    try:
        names = huggingface.gguf_names(repo, revision)
    except ForetellError:
        names = []
    if names:
        return ModelError(f"{repo}: holds GGUF files; name one, as {repo}/FILE: {', '.join(names)}")
    return type(error)(f"{repo}: {str(error).partition(': ')[2]}")
