"""Corpora for tests: fixed documents, and files with a tokenizer of one token per character."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence as Values
from pathlib import Path

import numpy as np

from foretell.draft.corpus.context_index import ContextArrays, ContextIndex
from foretell.draft.corpus.corpus import DraftCorpus, DraftCorpusConfig
from foretell.draft.corpus.drafter import CorpusDrafter
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, Sequence


def index_of(documents: Values[Values[int]], stale: frozenset[int] = frozenset()) -> ContextIndex:
    """Return the index of documents given as tokens."""
    starts = [0]
    for each in documents:
        starts.append(starts[-1] + len(each) + 1)
    return ContextIndex(ContextArrays.build([np.array(text, dtype=np.int32) for text in documents]), starts[:-1], stale)


def random_documents(seed: int, vocab: int = 32) -> list[list[int]]:
    """Return documents of which some have any pair of tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(400)] for _ in range(10)]


class FixedCorpus:
    """Versions of a corpus, one of which is current; `advance` makes the next one current."""

    def __init__(self, *versions: Values[Values[int]]) -> None:
        self.versions = [(index_of(documents),) for documents in versions]
        self.current = 0

    def indices(self, tenant: str) -> tuple[ContextIndex, ...]:
        return self.versions[self.current]

    def advance(self) -> None:
        self.current = (self.current + 1) % len(self.versions)


class CharTokenizer:
    """One token for each character; counts the documents it encodes."""

    def __init__(self, name: str = "chars") -> None:
        self.name = name
        self.encoded: list[str] = []

    def as_json(self) -> str:
        return self.name

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.encoded.append(text)
        return [ord(letter) for letter in text]


def open_files(
    *roots: Path, tokenizer: CharTokenizer | None = None, tokens: int = 1 << 20, **others: Path
) -> DraftCorpus:
    """Index files that all tenants share, and those of single tenants."""
    by_tenant = {"": tuple(map(str, roots))} if roots else {}
    by_tenant |= {tenant: (str(root),) for tenant, root in others.items()}
    return DraftCorpus(DraftCorpusConfig(by_tenant, tokens * 12), tokenizer or CharTokenizer())  # type: ignore[arg-type]


def sequence(text: str | list[int], tenant: str = "") -> Sequence:
    tokens = [ord(letter) for letter in text] if isinstance(text, str) else text
    return Sequence(0, Request("0", tuple(tokens), SamplingParams(), 0, 1000, tenant=tenant), list(tokens))


def draft_of(corpus: DraftCorpus | FixedCorpus, text: str | list[int], nodes: int = 8, tenant: str = "") -> Draft:
    (draft,) = CorpusDrafter(corpus).propose([sequence(text, tenant)], [Budget(nodes)])
    return draft


def draft_text(corpus: DraftCorpus, text: str, nodes: int = 8, tenant: str = "") -> str:
    """Return what is drafted after a text."""
    return "".join(map(chr, draft_of(corpus, text, nodes, tenant).tokens))


def write(path: Path, text: str | bytes, mtime: int | None = None) -> Path:
    """Write a file, with its folders, and if given its time of modification in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if mtime is not None:
        os.utime(path, (mtime, mtime))
    return path
