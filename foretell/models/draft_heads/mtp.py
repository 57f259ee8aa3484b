"""Multi-token prediction (MTP): the layer a target was trained with to predict one token further."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.layers import Linear, Norm
from foretell.models.sharding import Shard

from .base import DraftHead
from .config import MtpConfig
from .layer import Attend, HeadLayer, KeysValues, RopeRows, last_layer_kv


class MtpHead(DraftHead[MtpConfig]):
    """An MTP head with the interface of an EAGLE head, applied again for each further token."""

    def __init__(self, config: MtpConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width = config.layer.width
        self.embed_norm, self.feature_norm = Norm(width), Norm(width)
        self.fc = Linear(2 * width, len(self.local_columns))
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(width)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Return the target's last state as the input of a step."""
        return self.normalize_hidden(hidden_states)

    def local_hidden(self, hidden_states: Tensor) -> Tensor:
        return super().local_hidden(self.normalize_hidden(hidden_states))

    def step(self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        """Return states [..., width] after tokens [...], given the previous hidden states [..., width]."""
        x = self._read(tokens, hidden)
        for layer in self.layers:
            x = layer(x, rope_rows, attend)
        return x

    def keys_values(
        self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend | None = None
    ) -> KeysValues:
        """Return keys and values of the last layer; `attend` stores those of earlier layers."""
        return last_layer_kv(self.layers, self._read(tokens, hidden), rope_rows, attend)

    def carry(self, states: Tensor) -> Tensor:
        """Return the hidden state of this position for the next step."""
        return self._normed(states) if self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., outputs] over `draft_ids` of states [..., width]."""
        return self.output_logits(self._normed(states))

    def _read(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        eps = self.config.layer.norm_eps
        embedded = rms_norm(self.embed_tokens(tokens), self.embed_norm.weight, eps)
        return self.gather_columns(self.fc(torch.cat([embedded, rms_norm(hidden, self.feature_norm.weight, eps)], -1)))

    def _normed(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.norm.weight, self.config.layer.norm_eps)
