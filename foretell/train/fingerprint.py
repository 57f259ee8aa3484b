"""What answers depend on: the target's files and the settings they are generated with."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

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
