"""Attention of whole texts at once, without pages: the plain way, to examine heads by and to compare others with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import BlockConfig, LayerConfig


class DenseChainAttention:
    """What an EAGLE head sees of a text [rows, ..] step by step: of the first step's places those up to its own, of
    later steps the guesses of its own column alone."""

    def __init__(self, config: LayerConfig) -> None:
        self.config = config
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        kept.append((k, v))
        place = torch.arange(len(q), device=q.device)
        causal = _near(place[:, None] + len(kept) - 1, place, self.config) & (place <= place[:, None])
        own = [torch.eye(len(q), dtype=torch.bool, device=q.device)] * (len(kept) - 1)
        keys, values = (torch.cat([pair[i] for pair in kept]) for i in (0, 1))
        return attend(q, keys, values, torch.cat([causal, *own], 1), self.config)


class DenseBlockAttention:
    """What the blocks of several anchors see: what was read before each anchor, `read` by layer, and their own rows."""

    def __init__(self, config: BlockConfig, read: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.config, self.read, self.anchors = config, read, anchors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read_k, read_v = self.read[layer]
        count, rows = len(self.anchors), self.config.block
        place = torch.arange(len(read_k), device=q.device)
        before = (place < self.anchors[:, None]) & _near(self.anchors[:, None] - 1, place, self.config.layer)
        row = torch.arange(count * rows, device=q.device)
        own = row[:, None] // rows == row // rows
        own = own.tril() if self.config.causal_in_block else own
        seen = torch.cat([before.repeat_interleave(rows, 0), own], 1)
        flat = [t.reshape(count * rows, *t.shape[-2:]) for t in (q, k, v)]
        out = attend(flat[0], torch.cat([read_k, flat[1]]), torch.cat([read_v, flat[2]]), seen, self.config.layer)
        return out.view(q.shape)


def _near(row: Tensor, column: Tensor, config: LayerConfig) -> Tensor:
    """Whether a column lies in the window of a row."""
    return column > row - config.window if config.window is not None else torch.ones_like(column > row)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, config: LayerConfig) -> Tensor:
    """q [rows, heads, dim], k and v [columns, kv_heads, dim], seen [rows, columns] -> [rows, heads, dim]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=config.scale, enable_gqa=True)
    return out[0].transpose(0, 1)
