"""Gemma 4's `assistant`: layers that attend to the target's own keys and values, with none of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.attention import SpanGroup
from foretell.kernels.norm import rms_norm
from foretell.kv.cache import KVCache
from foretell.models.config import Rope
from foretell.models.decoder import Block, ForwardBatch, rope_rows_at
from foretell.models.layers import Linear, Norm
from foretell.models.rope import rope_table
from foretell.models.sharding import Shard

from .base import DraftHead, TargetWeights
from .config import AssistantConfig


class AssistantHead(DraftHead[AssistantConfig]):
    """A small decoder over [embedding of the last token, hidden state before it], at one position for a whole draft."""

    token_ordering: Tensor  # [vocab]: tokens by cluster

    def __init__(self, config: AssistantConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width = config.decoder.width
        self.pre_projection = Linear(2 * config.target_width, width)
        self.blocks = nn.ModuleList(Block(config.decoder, layer) for layer in range(config.decoder.layers))
        self.norm = Norm(width)
        self.post_projection = Linear(width, config.target_width)
        self.rope_tables: dict[Rope, Tensor] = {}
        if config.centroids:
            del self.output
            self.table = nn.Parameter(torch.empty(config.vocab, width), requires_grad=False)  # rows are gathered
            self.centroids = Linear(width, config.centroids)
            self.register_buffer("token_ordering", torch.arange(config.vocab, device="cpu"))

    def share_weights(self, target: TargetWeights) -> None:
        self._shared_embed = target.embed
        self.target_norm, self.target_norm_eps = target.norm.to(self.like), target.norm_eps

    def prepare(self, context: int) -> None:
        decoder, device = self.config.decoder, self.draft_ids.device
        for rope, layer in {rope: layer for layer, rope in enumerate(decoder.ropes)}.items():
            table = rope_table(rope, decoder.at(layer).head_dim, context)
            self.rope_tables[rope] = table.to(device, self.like.dtype)

    def step(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, groups: list[SpanGroup], cache: KVCache
    ) -> Tensor:
        """Return the normalized states [n, width] of tokens [n] after hidden states [n, target width].

        `groups` are the spans of the target's `cache` that rows attend to.
        """
        x = self.pre_projection(torch.cat([self.embed_tokens(tokens), hidden.to(self.like.dtype)], -1))
        batch = ForwardBatch(tokens, positions, positions, groups)  # slots are not used: nothing is stored
        rope_rows = {rope: rope_rows_at(table, positions) for rope, table in self.rope_tables.items()}
        for block in self.blocks:
            x = block(x, batch, cache, rope_rows)
        return rms_norm(x, self.norm.weight, self.config.decoder.norm_eps)

    def carry(self, states: Tensor) -> Tensor:
        """Return the hidden states [n, target width] of the next step."""
        projected: Tensor = self.post_projection(states)
        return projected

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [n, vocab], in float32. Tokens outside of the nearest clusters have -inf."""
        if not self.config.centroids:
            return self.output_logits(states)
        nearest = self.centroids(states).topk(self.config.active_centroids).indices
        tokens = self.token_ordering.view(self.config.centroids, -1)[nearest].flatten(1)
        found = torch.einsum("nw,ntw->nt", states, F.embedding(tokens, self.table)).float()
        return found.new_full((len(states), self.config.vocab), float("-inf")).scatter_(1, tokens, found)
