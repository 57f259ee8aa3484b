"""Tokenized training documents: their file (answers.npz), the draft vocabulary, and batches.

Only token ids are stored, at two to four bytes a token. Hidden states would take thousands of bytes, so they are
recomputed during training.
"""

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

ANSWERS_FILE = "answers.npz"
HASHED_SUFFIXES = (".json", ".safetensors", ".gguf", ".bin", ".model", ".txt", ".jinja")
HASH_BLOCK = 1 << 20  # bytes
HASH_BLOCKS = 16  # blocks hashed of a larger file, evenly spaced and including the first and the last
LENGTH_JITTER = 0.15  # relative noise on lengths before sorting, so that a batch mixes documents of similar length

Tokens = NDArray[np.int64]
Fingerprint = dict[str, Any]  # setting name to value, so that an error can name the setting that differs


def answers_fingerprint(target: str, settings: object) -> Fingerprint:
    """Return the values that must match before answers are reused: the target's hash and a dataclass of settings."""
    assert is_dataclass(settings) and not isinstance(settings, type)
    return {"target": target, **asdict(settings)}


def target_fingerprint(path: Path) -> str:
    """Hash a model folder or a GGUF file: config, tokenizer, chat template and weights.

    The hash does not depend on the folder's path. Large files are hashed in part: fine-tuning changes all of them.
    """
    files = sorted(file for file in path.iterdir() if _is_hashed(file)) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _update_digest(digest, file)
    return digest.hexdigest()


def _is_hashed(file: Path) -> bool:
    return file.is_file() and file.suffix in HASHED_SUFFIXES


def _update_digest(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= HASH_BLOCK * HASH_BLOCKS:
            digest.update(stream.read())
            return
        for number in range(HASH_BLOCKS):
            stream.seek((size - HASH_BLOCK) * number // (HASH_BLOCKS - 1))
            digest.update(stream.read(HASH_BLOCK))


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt and its answer as token ids. The loss covers the answer, from `answer_start` on."""

    tokens: Tokens
    answer_start: int
    temperature: float = 0.0  # that the answer was sampled at
    index: int = 0  # sort key: documents keep the order of their prompts
    masked_spans: tuple[tuple[int, int], ...] = ()  # [start, stop) after `answer_start` that the loss skips

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in self.tokens[: self.answer_start]]

    @property
    def eval_prompt(self) -> list[int]:
        """Return the prompt, or the first half of plain text, which has no prompt."""
        end = self.answer_start if self.answer_start > 1 else len(self.tokens) // 2
        return [int(token) for token in self.tokens[:end]]

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that the loss covers."""
        mask = np.arange(len(self.tokens)) >= self.answer_start
        for start, stop in self.masked_spans:
            mask[start:stop] = False
        return mask

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


def save_documents(documents: list[Document], path: Path, fingerprint: Fingerprint | None = None) -> None:
    """Write the file atomically. `fingerprint` records the target and the settings that produced the answers."""
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
    """Load a file that `save_documents` wrote."""
    try:
        with np.load(path) as file:
            tokens, lengths = file["tokens"].astype(np.int64), file["lengths"]
            starts, temperatures, indices = file["begins"], file["temperatures"], file["indices"]
    except (OSError, ValueError, KeyError) as error:
        raise RequestError("answers", f"{path} cannot be read: {error}") from None
    chunks = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    rows = zip(chunks, starts, temperatures, indices, strict=True)
    return [Document(tokens, int(start), float(temperature), int(i)) for tokens, start, temperature, i in rows]


def load_fingerprint(path: Path) -> Fingerprint | None:
    """Return the fingerprint a file was saved with, or None if it has none."""
    with np.load(path) as file:
        found = json.loads(str(file["fingerprint"]) or "null") if "fingerprint" in file else None
    return found if isinstance(found, dict) else None


def data_hash(documents: list[Document]) -> str:
    """Hash the training documents in their order."""
    digest = hashlib.sha256()
    for each in documents:
        digest.update(each.answer_start.to_bytes(4, "little"))
        digest.update(each.tokens.tobytes())
    return digest.hexdigest()


def draft_vocabulary(documents: list[Document], size: int, vocab: int) -> list[int]:
    """Return the most frequent answer tokens as sorted ids; ties go to the lower id."""
    counts: Counter[int] = Counter()
    for each in documents:
        counts.update(each.tokens[each.answer_start :].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return sorted(ranked[:size])


def coverage(documents: list[Document], ids: list[int]) -> float:
    """Return the fraction of answer tokens that are in the draft vocabulary `ids`."""
    known = np.zeros(max(max(ids), *(int(each.tokens.max()) for each in documents)) + 1, bool)
    known[ids] = True
    answers = np.concatenate([each.tokens[each.answer_start :] for each in documents])
    return float(known[answers].mean()) if answers.size else 0.0


def join_documents(documents: list[Document], fraction: float, max_tokens: int, seed: int) -> list[Document]:
    """Concatenate a random fraction of the documents up to `max_tokens` each, so that heads see long contexts too."""
    rng = random.Random(seed)
    alone: list[Document] = []
    groups: list[list[Document]] = [[]]
    for each in documents:
        if rng.random() >= fraction:
            alone.append(each)
            continue
        if groups[-1] and sum(len(other.tokens) for other in groups[-1]) + len(each.tokens) > max_tokens:
            groups.append([])
        groups[-1].append(each)
    return alone + [_concatenate(group) for group in groups if group]


def _concatenate(parts: list[Document]) -> Document:
    """Join documents into one; the loss skips the prompts of all but the first as well."""
    starts = np.cumsum([0, *(len(each.tokens) for each in parts)]).tolist()
    prompts = tuple((start, start + each.answer_start) for start, each in zip(starts[1:], parts[1:], strict=False))
    tokens = np.concatenate([each.tokens for each in parts])
    return Document(tokens, parts[0].answer_start, masked_spans=prompts)


@dataclass(frozen=True)
class TrainBatch:
    """Documents as rows, right-padded to one length."""

    tokens: Tensor  # [rows, length]
    loss_mask: Tensor  # [rows, length]: the loss covers this token

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


class BatchLoader:
    """Groups documents of similar length into batches, so that padding is rare and rows need no document mask.

    The batch of a step depends only on (seed, step): a resumed run needs nothing but its step number.
    """

    def __init__(self, documents: list[Document], batch_tokens: int, seed: int, device: torch.device) -> None:
        self.documents, self.batch_tokens, self.seed, self.device = documents, batch_tokens, seed, device
        # Epochs shuffle the order of the same batches, so that the target's hidden states of a batch can be cached.
        self._groups = self._group_by_length(range(len(documents)), random.Random(f"{seed} 0"))
        self._epoch, self._order = 0, self._shuffled(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._groups)

    def batch_index(self, step: int) -> int:
        """Return the index, within the epoch, of the batch that a step trains on."""
        epoch = step // len(self._groups)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._order[step % len(self._groups)]

    def get(self, step: int) -> TrainBatch:
        """Return the batch of a step."""
        return self.collate([self.documents[i] for i in self._groups[self.batch_index(step)]])

    def collate(self, documents: list[Document]) -> TrainBatch:
        """Pad documents to the longest of them."""
        length = max(len(each.tokens) for each in documents)
        tokens = np.zeros((len(documents), length), np.int64)
        loss_mask = np.zeros((len(documents), length), bool)
        for row, each in enumerate(documents):
            tokens[row, : len(each.tokens)] = each.tokens
            loss_mask[row, : len(each.tokens)] = each.loss_mask
        return TrainBatch(torch.from_numpy(tokens).to(self.device), torch.from_numpy(loss_mask).to(self.device))

    def eval_batches(self) -> list[TrainBatch]:
        """Return every document once, in batches that do not depend on the seed."""
        groups = self._group_by_length(range(len(self.documents)), None)
        return [self.collate([self.documents[i] for i in rows]) for rows in groups]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._groups)))
        random.Random(f"{self.seed} {epoch} order").shuffle(order)
        return order

    def _group_by_length(self, indices: range, rng: random.Random | None) -> list[list[int]]:
        """Sort by length, with jitter if there is an `rng`, and cut into batches of at most `batch_tokens`."""

        def sort_key(i: int) -> float:
            return len(self.documents[i].tokens) * (
                1.0 if rng is None else rng.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER)
            )

        groups: list[list[int]] = [[]]
        longest = 0
        for i in sorted(indices, key=sort_key, reverse=True):
            longest = max(longest, len(self.documents[i].tokens))
            if groups[-1] and longest * (len(groups[-1]) + 1) > self.batch_tokens:
                groups.append([])
                longest = len(self.documents[i].tokens)
            groups[-1].append(i)
        return groups
