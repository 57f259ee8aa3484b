"""A tiny target with one rule, that each token is followed by its own other token; and documents of what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from foretell.certify.distribution_test import random_decoder
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead
from foretell.train.capture import Capture
from foretell.train.init_head import head_config, new_head
from foretell.train.settings import TrainConfig
from foretell.train.token_dataset import Document, draft_vocabulary
from tests.tiny import CONFIG

CONTEXT = 64
CPU = torch.device("cpu")
RULED = replace(CONFIG, tied=False)
ORDER = np.random.default_rng(3).permutation(CONFIG.vocab)
NEXT = np.empty_like(ORDER)
NEXT[ORDER] = np.roll(ORDER, -1)  # one round through all tokens: nothing comes twice in a short text


def target() -> Decoder:
    """Layers that say next to nothing between an embedding and an output that know the rule."""
    model = random_decoder(RULED, 0, 0.02)
    with torch.no_grad():
        model.embed.copy_(torch.nn.init.orthogonal_(torch.empty(CONFIG.vocab, CONFIG.width)) * 6)
        assert model.head.weight is not None
        model.head.weight[torch.tensor(NEXT)] = model.embed
    return model


def texts(count: int = 24, length: int = 32, seed: int = 0) -> list[Document]:
    """What the target says from any token on."""
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        tokens = [int(rng.integers(0, CONFIG.vocab))]
        while len(tokens) < length - index % 7:
            tokens.append(int(NEXT[tokens[-1]]))
        found.append(Document(np.array(tokens, np.int64), 6, index=index))
    return found


def head_for(kind: str, model: Decoder, **settings: object) -> DraftHead[Any]:
    """A head of that kind, as a run makes it."""
    config = TrainConfig(**{"draft_vocab": 28, **settings})  # type: ignore[arg-type]
    outputs = min(config.draft_vocab or CONFIG.vocab, CONFIG.vocab)
    said = head_config(kind, model.config, config, outputs, "tiny")
    return new_head(said, draft_vocabulary(texts(), outputs, CONFIG.vocab), model, 0, CONTEXT + 16)


def capture_for(head: DraftHead[Any], model: Decoder) -> Capture:
    return Capture(model, head.config.hidden_layers, CONTEXT)
