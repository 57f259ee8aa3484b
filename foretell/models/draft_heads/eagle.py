"""EAGLE heads: each draft token is predicted from the state after the previous one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.layers import Linear, Norm
from foretell.models.sharding import Shard

from .base import DraftHead, norm_each
from .config import EagleConfig
from .layer import Attend, HeadLayer, KeysValues, RopeRows, last_layer_kv


class EagleHead(DraftHead[EagleConfig]):
    """An EAGLE-1 or EAGLE-3 head. A step maps (previous hidden state, token) to the state of the next token."""

    def __init__(self, config: EagleConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width, is_eagle3 = config.layer.width, config.generation == 3
        inputs = len(config.hidden_layers) * config.target_width
        self.fc = Linear(inputs if is_eagle3 else 2 * width, len(self.local_columns), config.fc_bias)
        self.tap_norms = nn.ModuleList(Norm(config.target_width) for _ in config.hidden_layers if config.fc_norm)
        self.fc_norm = Norm(inputs) if config.norm_before_fc else None
        self.embed_norm = Norm(width) if is_eagle3 else None
        self.feature_norm = Norm(width) if is_eagle3 else None
        first = HeadLayer(self.local, 0, 2 * width if is_eagle3 else width, input_norm=False)
        self.layers = nn.ModuleList([first, *(HeadLayer(self.local, i) for i in range(1, config.layers))])
        self.norm = Norm(width) if is_eagle3 else None

    @property
    def is_fusible(self) -> bool:
        return self.config.generation == 3 and self.shard is None

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Project the target's states [..., hidden layers * target width] to the input of a step, [..., width]."""
        return self.gather_columns(self.local_hidden(hidden_states))

    def local_hidden(self, hidden_states: Tensor) -> Tensor:
        x, config = self.normalize_hidden(hidden_states), self.config
        if config.generation == 1:
            return super().local_hidden(x)
        eps = config.layer.norm_eps
        if config.fc_norm:
            x = norm_each(x, self.tap_norms, eps)
        if self.fc_norm is not None:
            x = rms_norm(x, self.fc_norm.weight, eps)
        fused: Tensor = self.fc(x)
        return fused

    def step(self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        """Return states [..., width] after tokens [...], given the previous hidden states [..., width]."""
        x, residual = self._read(tokens, hidden)
        for layer in self.layers:
            x = layer(x, rope_rows, attend, residual)
            residual = None
        return x

    def keys_values(
        self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend | None = None
    ) -> KeysValues:
        """Return keys and values of the last layer; `attend` stores those of earlier layers."""
        x, residual = self._read(tokens, hidden)
        return last_layer_kv(self.layers, x, rope_rows, attend, residual)

    def carry(self, states: Tensor) -> Tensor:
        """Return the hidden state of this position for the next step."""
        return self._normed(states) if self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., outputs] over `draft_ids` of states [..., width]."""
        return self.output_logits(self._normed(states))

    def _read(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first layer and its residual if that differs from the input."""
        embedded, eps = self.embed_tokens(tokens), self.config.layer.norm_eps
        if self.embed_norm is None or self.feature_norm is None:
            return self.gather_columns(self.fc(torch.cat([embedded, hidden], -1))), None
        normed = rms_norm(hidden, self.feature_norm.weight, eps)
        x = torch.cat([rms_norm(embedded, self.embed_norm.weight, eps), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden

    def _normed(self, states: Tensor) -> Tensor:
        return states if self.norm is None else rms_norm(states, self.norm.weight, self.config.layer.norm_eps)
