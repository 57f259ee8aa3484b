"""Multi-token prediction: the layer a target was trained with to guess one token further."""

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
    """Steps like an EAGLE head, and is used again for each further token."""

    def __init__(self, config: MtpConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width = config.layer.width
        self.embed_norm, self.feature_norm = Norm(width), Norm(width)
        self.fc = Linear(2 * width, len(self.local_columns))
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(width)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last state, as a step starts from it."""
        return self.normalize_hidden(features)

    def local_hidden(self, features: Tensor) -> Tensor:
        return super().local_hidden(self.normalize_hidden(features))

    def step(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        """States [..., width] behind tokens [...] whose places before have these features, [..., width]."""
        x = self._read(tokens, feature)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return x

    def keys_values(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend | None = None) -> KeysValues:
        """Keys and values of the last layer. Those before it, where there are any, keep theirs through `attend`."""
        return last_layer_kv(self.layers, self._read(tokens, feature), turn, attend)

    def carry(self, states: Tensor) -> Tensor:
        """What the next step takes for the feature of this place."""
        return self._normed(states) if self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., outputs], over `draft_ids`."""
        return self.output_logits(self._normed(states))

    def _read(self, tokens: Tensor, feature: Tensor) -> Tensor:
        eps = self.config.layer.norm_eps
        embedded = rms_norm(self.embed_tokens(tokens), self.embed_norm.weight, eps)
        return self.gather_columns(self.fc(torch.cat([embedded, rms_norm(feature, self.feature_norm.weight, eps)], -1)))

    def _normed(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.norm.weight, self.config.layer.norm_eps)
