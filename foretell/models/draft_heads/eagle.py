"""EAGLE heads: each guess is made from the state behind the one before it."""

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
    """A step takes the pair (feature of the place before, token) and gives a state: of its guess, and to go on from."""

    def __init__(self, config: EagleConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width, third = config.layer.width, config.generation == 3
        taps = len(config.hidden_layers) * config.target_width
        self.fc = Linear(taps if third else 2 * width, len(self.local_columns), config.fc_bias)
        self.tap_norms = nn.ModuleList(Norm(config.target_width) for _ in config.hidden_layers if config.fc_norm)
        self.fc_norm = Norm(taps) if config.norm_before_fc else None
        self.embed_norm = Norm(width) if third else None
        self.feature_norm = Norm(width) if third else None
        first = HeadLayer(self.local, 0, 2 * width if third else width, input_norm=False)
        self.layers = nn.ModuleList([first, *(HeadLayer(self.local, i) for i in range(1, config.layers))])
        self.norm = Norm(width) if third else None

    @property
    def is_fusible(self) -> bool:
        return self.config.generation == 3 and self.shard is None

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., taps * target width] as what a step starts from, [..., width]."""
        return self.gather_columns(self.local_hidden(features))

    def local_hidden(self, features: Tensor) -> Tensor:
        x, config = self.normalize_hidden(features), self.config
        if config.generation == 1:
            return super().local_hidden(x)
        eps = config.layer.norm_eps
        if config.fc_norm:
            x = norm_each(x, self.tap_norms, eps)
        if self.fc_norm is not None:
            x = rms_norm(x, self.fc_norm.weight, eps)
        fused: Tensor = self.fc(x)
        return fused

    def step(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        """States [..., width] behind tokens [...] whose places before have these features, [..., width]."""
        x, residual = self._read(tokens, feature)
        for layer in self.layers:
            x = layer(x, turn, attend, residual)
            residual = None
        return x

    def keys_values(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend | None = None) -> KeysValues:
        """Keys and values of the last layer. Those before it, where there are any, keep theirs through `attend`."""
        x, residual = self._read(tokens, feature)
        return last_layer_kv(self.layers, x, turn, attend, residual)

    def carry(self, states: Tensor) -> Tensor:
        """What the next step takes for the feature of this place."""
        return self._normed(states) if self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., outputs], over `draft_ids`."""
        return self.output_logits(self._normed(states))

    def _read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first layer attends with, and what its result is added to where that is something else."""
        embedded, eps = self.embed_tokens(tokens), self.config.layer.norm_eps
        if self.embed_norm is None or self.feature_norm is None:
            return self.gather_columns(self.fc(torch.cat([embedded, feature], -1))), None
        normed = rms_norm(feature, self.feature_norm.weight, eps)
        x = torch.cat([rms_norm(embedded, self.embed_norm.weight, eps), normed], -1)
        return x, normed if self.config.norm_before_residual else feature

    def _normed(self, states: Tensor) -> Tensor:
        return states if self.norm is None else rms_norm(states, self.norm.weight, self.config.layer.norm_eps)
