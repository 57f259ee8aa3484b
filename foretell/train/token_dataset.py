"""Token ids of asks and answers, and their file: a few bytes a token, where states would take thousands."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretell.errors import RequestError

from .fingerprint import Fingerprint

FILE = "answers.npz"
Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Document:
    """A text that the target runs over; from `begin` on it is what a drafter would guess."""

    tokens: Tokens
    begin: int
    temperature: float = 0.0  # the answer was drawn with
    index: int = 0  # of the ask it came from, in order
    asides: tuple[tuple[int, int], ...] = ()  # stretches behind `begin` that are not learnt

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in self.tokens[: self.begin]]

    @property
    def opening(self) -> list[int]:
        """The prompt; of running text, which has none, the first half."""
        end = self.begin if self.begin > 1 else len(self.tokens) // 2
        return [int(token) for token in self.tokens[:end]]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which tokens count."""
        counts = np.arange(len(self.tokens)) >= self.begin
        for start, stop in self.asides:
            counts[start:stop] = False
        return counts

    @property
    def learnt(self) -> int:
        """Tokens of it that count."""
        return int(self.mask.sum())


def save_documents(documents: list[Document], path: Path, fingerprint: Fingerprint | None = None) -> None:
    """Write the file whole or not at all; `fingerprint` says which target and settings it came from."""
    flat = np.concatenate([each.tokens for each in documents]) if documents else np.zeros(0, np.int64)
    kind = np.uint16 if flat.size == 0 or flat.max() < 1 << 16 else np.uint32
    part = path.with_name(f".{path.name}.part.npz")
    np.savez_compressed(
        part,
        tokens=flat.astype(kind),
        lengths=np.array([len(each.tokens) for each in documents], np.int64),
        begins=np.array([each.begin for each in documents], np.int64),
        temperatures=np.array([each.temperature for each in documents], np.float32),
        indices=np.array([each.index for each in documents], np.int64),
        fingerprint=np.array("" if fingerprint is None else json.dumps(fingerprint)),
    )
    os.replace(part, path)


def load_documents(path: Path) -> list[Document]:
    """What `save_documents` wrote."""
    try:
        with np.load(path) as file:
            tokens, lengths = file["tokens"].astype(np.int64), file["lengths"]
            begins, temperatures, indices = file["begins"], file["temperatures"], file["indices"]
    except (OSError, ValueError, KeyError) as error:
        raise RequestError("answers", f"{path} cannot be read: {error}") from None
    pieces = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    rows = zip(pieces, begins, temperatures, indices, strict=True)
    return [Document(tokens, int(begin), float(warmth), int(index)) for tokens, begin, warmth, index in rows]


def load_fingerprint(path: Path) -> Fingerprint | None:
    """Return the fingerprint a file was saved with; None where it has none."""
    with np.load(path) as file:
        found = json.loads(str(file["fingerprint"]) or "null") if "fingerprint" in file else None
    return found if isinstance(found, dict) else None


def data_hash(documents: list[Document]) -> str:
    """Of everything that is trained on, in its order."""
    digest = hashlib.sha256()
    for each in documents:
        digest.update(each.begin.to_bytes(4, "little"))
        digest.update(each.tokens.tobytes())
    return digest.hexdigest()


def draft_vocabulary(documents: list[Document], size: int, vocab: int) -> list[int]:
    """The tokens a head may guess: those most often learnt, as rising ids; ties go to the lower id."""
    counts: Counter[int] = Counter()
    for each in documents:
        counts.update(each.tokens[each.begin :].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return sorted(ranked[:size])


def coverage(documents: list[Document], ids: list[int]) -> float:
    """The share of learnt tokens that are among `ids`."""
    known = np.zeros(max(max(ids), *(int(each.tokens.max()) for each in documents)) + 1, bool)
    known[ids] = True
    learnt = np.concatenate([each.tokens[each.begin :] for each in documents])
    return float(known[learnt].mean()) if learnt.size else 0.0


def joined(documents: list[Document], share: float, most: int, seed: int) -> list[Document]:
    """The documents, a share of them strung together up to `most` tokens: heads have to see long texts, too."""
    rng = random.Random(seed)
    alone: list[Document] = []
    strings: list[list[Document]] = [[]]
    for each in documents:
        if rng.random() >= share:
            alone.append(each)
            continue
        if strings[-1] and sum(len(other.tokens) for other in strings[-1]) + len(each.tokens) > most:
            strings.append([])
        strings[-1].append(each)
    return alone + [_string(parts) for parts in strings if parts]


def _string(parts: list[Document]) -> Document:
    starts = np.cumsum([0, *(len(each.tokens) for each in parts)]).tolist()
    asides = tuple((start, start + each.begin) for start, each in zip(starts[1:], parts[1:], strict=False))
    return Document(np.concatenate([each.tokens for each in parts]), parts[0].begin, asides=asides)
