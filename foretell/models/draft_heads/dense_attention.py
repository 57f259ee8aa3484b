"""Dense attention over complete sequences, without pages: the reference for wiring checks and tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import BlockConfig, LayerConfig


class DenseChainAttention:
    """Attention of an EAGLE head over a sequence [rows, ..] step by step.

    A row sees the keys of the first step up to its own position and, of later steps, only its own column.
    """

    def __init__(self, config: LayerConfig) -> None:
        self.config = config
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        kept.append((k, v))
        position = torch.arange(len(q), device=q.device)
        causal = _near(position[:, None] + len(kept) - 1, position, self.config) & (position <= position[:, None])
        own = [torch.eye(len(q), dtype=torch.bool, device=q.device)] * (len(kept) - 1)
        keys, values = (torch.cat([pair[i] for pair in kept]) for i in (0, 1))
        return attend(q, keys, values, torch.cat([causal, *own], 1), self.config)


class DenseBlockAttention:
    """Attention of the blocks of several anchors: the context before each anchor, by layer, and their own rows."""

    def __init__(self, config: BlockConfig, context: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.config, self.context, self.anchors = config, context, anchors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = self.context[layer]
        count, rows = len(self.anchors), self.config.block
        position = torch.arange(len(context_k), device=q.device)
        before = (position < self.anchors[:, None]) & _near(self.anchors[:, None] - 1, position, self.config.layer)
        row = torch.arange(count * rows, device=q.device)
        own = row[:, None] // rows == row // rows
        own = own.tril() if self.config.causal_in_block else own
        mask = torch.cat([before.repeat_interleave(rows, 0), own], 1)
        flat = [t.reshape(count * rows, *t.shape[-2:]) for t in (q, k, v)]
        out = attend(flat[0], torch.cat([context_k, flat[1]]), torch.cat([context_v, flat[2]]), mask, self.config.layer)
        return out.view(q.shape)


def _near(row: Tensor, column: Tensor, config: LayerConfig) -> Tensor:
    """Return whether a column is in the sliding window of a row."""
    return column > row - config.window if config.window is not None else torch.ones_like(column > row)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, config: LayerConfig) -> Tensor:
    """Attend q [rows, heads, dim] to k and v [columns, kv_heads, dim], mask [rows, columns] -> [rows, heads, dim]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=config.scale, enable_gqa=True)
    return out[0].transpose(0, 1)
