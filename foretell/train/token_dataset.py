"""Token ids of asks and answers, and their file: a few bytes a token, where states would take thousands."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import RequestError

SUFFIXES = (".json", ".safetensors", ".gguf", ".bin", ".model", ".txt", ".jinja")
BLOCK, BLOCKS = 1 << 20, 16  # of a large file so many blocks are hashed, the first and the last among them

Fingerprint = dict[str, Any]  # by name, so that a message can say what differs


def answers_fingerprint(target: str, settings: object) -> Fingerprint:
    """Return what two runs must share to share answers: the target and a dataclass of settings."""
    assert is_dataclass(settings) and not isinstance(settings, type)
    return {"target": target, **asdict(settings)}


def target_fingerprint(path: Path) -> str:
    """Hash a model folder or a GGUF file: config, tokenizer, chat template and weights.

    A copy elsewhere has the same hash. Large files are hashed in part: fine-tuning changes all of them.
    """
    files = sorted(file for file in path.iterdir() if _counts(file)) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _add_blocks(digest, file)
    return digest.hexdigest()


def _counts(file: Path) -> bool:
    return file.is_file() and file.suffix in SUFFIXES


def _add_blocks(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= BLOCK * BLOCKS:
            digest.update(stream.read())
            return
        for number in range(BLOCKS):
            stream.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))


ANSWERS_FILE = "answers.npz"
Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Document:
    """A text that the target runs over; from `begin` on it is what a drafter would guess."""

    tokens: Tokens
    answer_start: int
    temperature: float = 0.0  # the answer was drawn with
    index: int = 0  # of the ask it came from, in order
    masked_spans: tuple[tuple[int, int], ...] = ()  # stretches behind `begin` that are not learnt

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in self.tokens[: self.answer_start]]

    @property
    def eval_prompt(self) -> list[int]:
        """The prompt; of running text, which has none, the first half."""
        end = self.answer_start if self.answer_start > 1 else len(self.tokens) // 2
        return [int(token) for token in self.tokens[:end]]

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Which tokens count."""
        counts = np.arange(len(self.tokens)) >= self.answer_start
        for start, stop in self.masked_spans:
            counts[start:stop] = False
        return counts

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of it that count."""
        return int(self.loss_mask.sum())


def save_documents(documents: list[Document], path: Path, fingerprint: Fingerprint | None = None) -> None:
    """Write the file whole or not at all; `fingerprint` says which target and settings it came from."""
    flat = np.concatenate([each.tokens for each in documents]) if documents else np.zeros(0, np.int64)
    kind = np.uint16 if flat.size == 0 or flat.max() < 1 << 16 else np.uint32
    part = path.with_name(f".{path.name}.part.npz")
    np.savez_compressed(
        part,
        tokens=flat.astype(kind),
        lengths=np.array([len(each.tokens) for each in documents], np.int64),
        begins=np.array([each.answer_start for each in documents], np.int64),
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
        digest.update(each.answer_start.to_bytes(4, "little"))
        digest.update(each.tokens.tobytes())
    return digest.hexdigest()


def draft_vocabulary(documents: list[Document], size: int, vocab: int) -> list[int]:
    """The tokens a head may guess: those most often learnt, as rising ids; ties go to the lower id."""
    counts: Counter[int] = Counter()
    for each in documents:
        counts.update(each.tokens[each.answer_start :].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return sorted(ranked[:size])


def coverage(documents: list[Document], ids: list[int]) -> float:
    """The share of learnt tokens that are among `ids`."""
    known = np.zeros(max(max(ids), *(int(each.tokens.max()) for each in documents)) + 1, bool)
    known[ids] = True
    learnt = np.concatenate([each.tokens[each.answer_start :] for each in documents])
    return float(known[learnt].mean()) if learnt.size else 0.0


def join_documents(documents: list[Document], share: float, most: int, seed: int) -> list[Document]:
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
    asides = tuple((start, start + each.answer_start) for start, each in zip(starts[1:], parts[1:], strict=False))
    return Document(np.concatenate([each.tokens for each in parts]), parts[0].answer_start, masked_spans=asides)


JITTER = 0.15  # by how much lengths are mixed up before sorting: neighbours are of like length, and otherwise anybody


@dataclass(frozen=True)
class TrainBatch:
    """Rows that end in padding."""

    tokens: Tensor  # [rows, length]
    loss_mask: Tensor  # [rows, length]: whether a place's token is one to guess

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


class BatchLoader:
    """The batch of any step, from (seed, step) alone: a run that was killed needs no more than its step's number."""

    def __init__(self, documents: list[Document], tokens: int, seed: int, device: torch.device) -> None:
        self.documents, self.batch_tokens, self.seed, self.device = documents, tokens, seed, device
        # Every epoch has the same batches in another order, so that what the target says of one can be kept.
        self._cuts = self._cut(range(len(documents)), random.Random(f"{seed} 0"))
        self._epoch, self._order = 0, self._ordered(0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return len(self._cuts)

    def batch_index(self, step: int) -> int:
        """Which of an epoch's batches a step has."""
        epoch = step // len(self._cuts)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._ordered(epoch)
        return self._order[step % len(self._cuts)]

    def get(self, step: int) -> TrainBatch:
        """The batch of a step."""
        return self.collate([self.documents[i] for i in self._cuts[self.batch_index(step)]])

    def collate(self, documents: list[Document]) -> TrainBatch:
        """These documents side by side."""
        length = max(len(each.tokens) for each in documents)
        tokens = np.zeros((len(documents), length), np.int64)
        learnt = np.zeros((len(documents), length), bool)
        for row, each in enumerate(documents):
            tokens[row, : len(each.tokens)] = each.tokens
            learnt[row, : len(each.tokens)] = each.loss_mask
        return TrainBatch(torch.from_numpy(tokens).to(self.device), torch.from_numpy(learnt).to(self.device))

    def eval_batches(self) -> list[TrainBatch]:
        """Every document once, in batches that do not change: to measure with."""
        return [self.collate([self.documents[i] for i in rows]) for rows in self._cut(range(len(self.documents)), None)]

    def _ordered(self, epoch: int) -> list[int]:
        order = list(range(len(self._cuts)))
        random.Random(f"{self.seed} {epoch} order").shuffle(order)
        return order

    def _cut(self, which: range, rng: random.Random | None) -> list[list[int]]:
        """Neighbours by length, as many to a batch as its tokens allow."""

        def rank(i: int) -> float:
            return len(self.documents[i].tokens) * (1.0 if rng is None else rng.uniform(1 - JITTER, 1 + JITTER))

        plan: list[list[int]] = [[]]
        longest = 0
        for i in sorted(which, key=rank, reverse=True):
            longest = max(longest, len(self.documents[i].tokens))
            if plan[-1] and longest * (len(plan[-1]) + 1) > self.batch_tokens:
                plan.append([])
                longest = len(self.documents[i].tokens)
            plan[-1].append(i)
        return plan
