"""A small draft model distilled from the target, over tokens only, with its embedding and LM head."""

from __future__ import annotations

from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.layers import Norm
from foretell.models.sharding import Shard

from .base import DraftHead
from .config import DistilledConfig
from .layer import Attend, HeadLayer, KeysValues, RopeRows, last_layer_kv


class DistilledHead(DraftHead[DistilledConfig]):
    """A head with the interface of an EAGLE head that ignores hidden states."""

    def __init__(self, config: DistilledConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(config.layer.width)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states unchanged; they are not used."""
        return hidden_states[..., : self.config.layer.width]

    def step(self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        """Return states [..., width] after tokens [...]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rope_rows, attend)
        return x

    def keys_values(
        self, tokens: Tensor, hidden: Tensor, rope_rows: RopeRows, attend: Attend | None = None
    ) -> KeysValues:
        """Return keys and values of the last layer; `attend` stores those of earlier layers."""
        return last_layer_kv(self.layers, self.embed_tokens(tokens), rope_rows, attend)

    def carry(self, states: Tensor) -> Tensor:
        """Return the states; the next step reads only its token."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., outputs] over `draft_ids` of states [..., width]."""
        return self.output_logits(rms_norm(states, self.norm.weight, self.config.layer.norm_eps))
