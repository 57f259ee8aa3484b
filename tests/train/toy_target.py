"""A tiny target that follows every token by one fixed token, and documents of its output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from foretell.certify.distribution_test import random_decoder
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead
from foretell.train.capture import HiddenStateCapture
from foretell.train.init_head import head_config, new_head
from foretell.train.settings import TrainConfig
from foretell.train.token_dataset import Document, draft_vocabulary
from tests.tiny import CONFIG

CONTEXT = 64
CPU = torch.device("cpu")
RULED = replace(CONFIG, tied=False)
ORDER = np.random.default_rng(3).permutation(CONFIG.vocab)
NEXT = np.empty_like(ORDER)
NEXT[ORDER] = np.roll(ORDER, -1)  # a cycle through all tokens: a short document repeats none


def target() -> Decoder:
    """Return a decoder whose embedding and output matrix encode the rule; its layers do almost nothing."""
    model = random_decoder(RULED, 0, 0.02)
    with torch.no_grad():
        model.embed.copy_(torch.nn.init.orthogonal_(torch.empty(CONFIG.vocab, CONFIG.width)) * 6)
        assert model.head.weight is not None
        model.head.weight[torch.tensor(NEXT)] = model.embed
    return model


def documents(count: int = 24, length: int = 32, seed: int = 0) -> list[Document]:
    """Return the target's output from random first tokens."""
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        tokens = [int(rng.integers(0, CONFIG.vocab))]
        while len(tokens) < length - index % 7:
            tokens.append(int(NEXT[tokens[-1]]))
        found.append(Document(np.array(tokens, np.int64), 6, index=index))
    return found


def head_for(kind: str, model: Decoder, **settings: object) -> DraftHead[Any]:
    """Return an untrained head, made as in a run."""
    config = TrainConfig(**{"draft_vocab": 28, **settings})  # type: ignore[arg-type]
    outputs = min(config.draft_vocab or CONFIG.vocab, CONFIG.vocab)
    shape = head_config(kind, model.config, config, outputs, "tiny")
    return new_head(shape, draft_vocabulary(documents(), outputs, CONFIG.vocab), model, 0, CONTEXT + 16)


def capture_for(head: DraftHead[Any], model: Decoder) -> HiddenStateCapture:
    return HiddenStateCapture(model, head.config.hidden_layers, CONTEXT)
