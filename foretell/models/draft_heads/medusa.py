"""Medusa heads: each predicts one position further, all from the target's last state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.models.layers import Linear
from foretell.models.sharding import Shard

from .base import DraftHead
from .config import MedusaConfig


class MedusaHead(DraftHead[MedusaConfig]):
    """Residual blocks initialized to zero, so that an untrained head predicts what the target's LM head does."""

    def __init__(self, config: MedusaConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width, columns = config.layer.width, len(self.local_columns)
        self.blocks = nn.ModuleList(
            nn.ModuleList(Linear(width, columns, config.bias) for _ in range(config.layers))
            for _ in range(config.heads)
        )
        self.outputs = nn.ModuleList()
        if config.own_output and not config.shared_output:
            del self.output
            self.outputs = nn.ModuleList(Linear(width, len(self.local_outputs)) for _ in range(config.heads))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.zero_()

    def forward(self, hidden_states: Tensor, heads: int | None = None) -> Tensor:
        """Return states [..., heads, width] of the first `heads` heads, or all, for target states [..., width]."""
        x = self.normalize_hidden(hidden_states)
        states = x[..., None, :].expand(*x.shape[:-1], len(self.blocks[:heads]), -1)
        for layer in range(self.config.layers):
            pairs = zip(states.unbind(-2), self.blocks, strict=False)
            states = states + F.silu(
                self.gather_columns(torch.stack([_block(blocks, layer)(x) for x, blocks in pairs], -2))
            )
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., heads, local outputs] over `draft_ids` of states [..., heads, width]."""
        if not len(self.outputs):
            return self.output_logits(states)
        parts = zip(states.unbind(-2), self.outputs, strict=False)
        return torch.stack([output(state).float() for state, output in parts], -2)


def _block(blocks: nn.Module, layer: int) -> nn.Module:
    assert isinstance(blocks, nn.ModuleList), "a head is made of blocks"
    return blocks[layer]
