"""A tiny target that speaks in loops, and documents of what it says."""

from __future__ import annotations

import numpy as np
import torch

from foretell.models.decoder import Decoder
from foretell.models.heads import Head
from foretell.train.capture import Capture
from foretell.train.documents import Document, draft_vocabulary
from foretell.train.making import head_config, new_head
from foretell.train.settings import TrainConfig
from tests.tiny import CONFIG, tiny_decoder

CONTEXT = 64
CPU = torch.device("cpu")


def texts(count: int = 24, length: int = 40, seed: int = 0) -> list[Document]:
    """Loops of a few tokens, each from its own place."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        loop = rng.integers(1, CONFIG.vocab, 5)
        found.append(Document(np.tile(loop, length)[: length - index % 7].astype(np.int64), 6, index=index))
    return found


def head_for(kind: str, target: Decoder, **settings: object) -> Head:
    """A head of that kind, as a run makes it."""
    config = TrainConfig(**{"draft_vocab": 24, **settings})  # type: ignore[arg-type]
    outputs = min(config.draft_vocab or CONFIG.vocab, CONFIG.vocab)
    said = head_config(kind, target.config, config, outputs, "tiny")
    return new_head(said, draft_vocabulary(texts(), outputs, CONFIG.vocab), target, 0, CONTEXT + 16)


def capture_for(head: Head, target: Decoder) -> Capture:
    return Capture(target, head.config.taps, CONTEXT)


def target() -> Decoder:
    return tiny_decoder()
