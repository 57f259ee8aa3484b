"""Heads that learn a few texts by heart: enough to tell a right wiring from a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from foretell.build.model_source import read_tokenizer
from foretell.draft.heads.wiring_check import CHECK_PROMPTS, GeneratedSample, generate_samples
from foretell.hub import open_checkpoint
from foretell.models.draft_heads import DraftHead, EagleHead, HeadConfig, LayerConfig, MtpHead, TargetWeights, make_head
from foretell.models.draft_heads.dense_attention import DenseChainAttention
from foretell.models.draft_heads.layer import init_weights
from foretell.models.load import load_model
from foretell.runner.model_runner import ModelRunner

LAYER = LayerConfig(width=32, heads=4, kv_heads=2, head_dim=8, ffn=48)


class Lesson:
    """A target, what it lends, and texts it wrote."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        model, tokenizer = load_model(checkpoint), read_tokenizer(checkpoint)
        self.lender, self.config = TargetWeights.of(model), model.config
        self.runner = ModelRunner(model, 64, 16, 128)
        self.starts = [tokenizer.encode(text) for text in CHECK_PROMPTS]
        with torch.inference_mode():
            written = generate_samples(self.runner, self.starts)
        self.texts = [GeneratedSample(text.tokens.clone(), text.states.clone(), text.first) for text in written]

    def head(self, config: HeadConfig) -> DraftHead[Any]:
        head = make_head(config)
        init_weights(head, torch.Generator().manual_seed(1), spread=0.15)
        if config.draft_vocab is not None:  # the tokens it is to learn, and some more
            used = {int(token) for text in self.texts for token in text.tokens}
            rest = [token for token in range(config.vocab) if token not in used]
            assert len(used) <= config.draft_vocab
            ids = sorted([*used, *rest[: config.draft_vocab - len(used)]])
            head.draft_ids.copy_(torch.tensor(ids))
        if isinstance(head, EagleHead) and head.fc.weight is not None:
            head.fc.weight.data *= 30  # whether the feature is normed before it is added is to make a difference
        head.share_weights(self.lender)
        head.prepare(128)
        return head

    def teach(self, head: DraftHead[Any], steps: int = 40) -> DraftHead[Any]:
        """Learn each next token of the texts from the states alone: what is tapped must matter."""
        assert isinstance(head, EagleHead | MtpHead) and head.embed_norm is not None
        with torch.no_grad():
            head.embed_norm.weight.zero_()
        parameters = [each for each in head.trainable_parameters() if each is not head.embed_norm.weight]
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        places = {int(token): i for i, token in enumerate(head.draft_ids)}
        for _ in range(steps):
            loss = torch.zeros(())
            for text in self.texts:
                features = text.states[:, list(head.config.hidden_layers)].flatten(1)
                turn = head.rope_rows(torch.arange(1, len(text.tokens)))
                look = DenseChainAttention(head.config.layer)
                states = head.step(text.tokens[1:], head.fuse(features)[:-1], turn, look)
                wanted = torch.tensor([places[int(token)] for token in text.tokens[2:]])
                loss = loss + F.cross_entropy(head.logits(states)[:-1], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return head.requires_grad_(False)
