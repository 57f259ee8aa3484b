"""A small model that learnt to speak like the target, over tokens alone, with its embedding and output rows."""

from __future__ import annotations

from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.layers import Norm
from foretell.models.sharding import Shard

from .base import DraftHead
from .config import DistilledConfig
from .layer import Attend, HeadLayer, KeysValues, RopeRows, last_layer_kv


class DistilledHead(DraftHead[DistilledConfig]):
    """Steps like an EAGLE head that looks at no feature, so what serves that one serves this."""

    def __init__(self, config: DistilledConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(config.layer.width)

    def fuse(self, features: Tensor) -> Tensor:
        """Nothing is made of the target's states."""
        return features[..., : self.config.layer.width]

    def step(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        """States [..., width] behind tokens [...]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return x

    def keys_values(self, tokens: Tensor, feature: Tensor, turn: RopeRows, attend: Attend | None = None) -> KeysValues:
        """Keys and values of the last layer. Those before it, where there are any, keep theirs through `attend`."""
        return last_layer_kv(self.layers, self.embed_tokens(tokens), turn, attend)

    def carry(self, states: Tensor) -> Tensor:
        """The next step looks at its token alone."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., outputs], over `draft_ids`."""
        return self.output_logits(rms_norm(states, self.norm.weight, self.config.layer.norm_eps))
