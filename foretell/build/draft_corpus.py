"""The option `draft_corpus`: which files, for which tenants, in how much memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from foretell.config import SpeculationConfig
from foretell.draft.corpus.corpus import DraftCorpus, DraftCorpusConfig
from foretell.errors import RequestError
from foretell.tokenizer import Tokenizer

OPTION = "draft_corpus"
# Before the path: the number of an API key or, where a server has replaced it, the tenant of that key's requests.
OWNED = re.compile(r"(?P<owner>[0-9]{1,9}|[0-9a-f]{64})=(?P<path>.*)", re.S)


def read_corpus_config(config: SpeculationConfig) -> DraftCorpusConfig | None:
    """Check the paths of a config, before anything is loaded; return None if it names none."""
    roots: dict[str, tuple[str, ...]] = {}
    for value in config.draft_corpus:
        owner, path = _split(value)
        if _is_number(owner):
            raise RequestError(OPTION, f"{value} is for an API key, which only foretell serve has; leave out {owner}=")
        roots[owner] = tuple(dict.fromkeys((*roots.get(owner, ()), _resolve(path))))
    return DraftCorpusConfig(roots, int(config.draft_corpus_memory * 2**30)) if roots else None


def open_corpus(
    config: DraftCorpusConfig | None, tokenizer: Tokenizer, progress: Callable[[str], None]
) -> DraftCorpus | None:
    """Index the files of a config and watch them; return None if it names none."""
    if config is None:
        return None
    began = perf_counter()
    corpus = DraftCorpus(config, tokenizer)
    corpus.watch()
    progress(f"draft corpus: {corpus.stats}, ready in {perf_counter() - began:.1f} s")
    return corpus


def for_tenants(values: Sequence[str], tenants: Sequence[str]) -> tuple[str, ...]:
    """Replace the number of an API key by the tenant of its requests."""
    replaced: list[str] = []
    for value in values:
        owner, path = _split(value)
        if owner and not (_is_number(owner) and 1 <= int(owner) <= len(tenants)):
            there = f"there are {len(tenants)}" if tenants else "there is none"
            raise RequestError(OPTION, f"{owner}= is no number of an --api-key, {there}; a folder is ./{owner}=...")
        replaced.append(f"{tenants[int(owner) - 1]}={path}" if owner else value)
    return tuple(replaced)


def is_shared(values: Sequence[str]) -> bool:
    """Return whether some of the paths are for all tenants."""
    return any(not _split(value)[0] for value in values)


def _split(value: str) -> tuple[str, str]:
    """Return the owner of a path, "" if it is shared, and the path."""
    found = OWNED.fullmatch(value)
    return ("", value) if found is None else (found["owner"], found["path"])


def _is_number(owner: str) -> bool:
    return owner.isdigit() and len(owner) < 64


def _resolve(path: str) -> str:
    """Return the real path of a file or folder; raise if it cannot be read."""
    found = Path(os.path.expanduser(path))
    try:
        found = found.resolve(strict=True)
        os.close(os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(OPTION, f"{path} cannot be read: {reason}; name a folder or a text file") from None
    if not found.is_dir() and not found.is_file():
        raise RequestError(OPTION, f"{path} is neither a file nor a folder; name a folder or a text file")
    return str(found)
