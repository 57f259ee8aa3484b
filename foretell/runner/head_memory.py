"""What a head remembers of several texts as columns of fixed number, and attention over them without a look at data."""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.models.heads import LayerConfig

# Not cuDNN's, which makes a plan for each new shape, a tenth of a second each.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class HeadMemory:
    """Keys and values of each layer, [texts, columns, kv_heads, dim]: places of the text, and behind them guesses.

    It is a copy: what is guessed is good for guesses only, and is never written to the pages.
    """

    def __init__(self, keys: Several[Tensor], values: Several[Tensor], config: LayerConfig, pages: Tensor) -> None:
        self.keys, self.values = ([t[pages].flatten(1, 2) for t in layers] for layers in (keys, values))
        self.config = config
        self.columns = 0 if not self.keys else self.keys[0].shape[1]

    def of_text(self, text: Tensor, columns: int, depths: Tensor, hidden: int) -> Tensor:
        """Which places of a text are seen by rows `depths` behind its end, [texts, rows, columns].

        Of a text those from `hidden` up to `text` are.
        """
        column, end = torch.arange(columns, device=text.device), text[:, None, None]
        seen = (column >= hidden) & (column < end)
        if self.config.window is None:
            return seen.expand(-1, len(depths), -1)
        return seen & (column > end + depths[:, None] - self.config.window)

    def near(self, depths: Tensor, others: Tensor) -> Tensor:
        """Whether a window lets rows of some depths see those of others, [rows, others]."""
        back = depths[:, None] - others
        return back >= 0 if self.config.window is None else (back >= 0) & (back < self.config.window)

    def bias(self, seen: Tensor) -> Tensor:
        """What is added to scores where a row may look, [texts, rows, columns], and where not."""
        nothing = torch.zeros(seen.shape, dtype=self.keys[0].dtype, device=seen.device)
        return nothing.masked_fill(~seen, float("-inf"))


class Glance:
    """Attention of as many new rows for each text, which it remembers from the column `first` on."""

    def __init__(self, memory: HeadMemory, bias: Tensor, first: int) -> None:
        """`bias` [texts, rows, columns]."""
        self.memory, self.bias, self.first = memory, bias, first

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        texts, rows = self.bias.shape[:2]
        own = slice(self.first, self.first + rows)
        keys[:, own] = k.view(texts, rows, *k.shape[1:]).to(keys.dtype)
        values[:, own] = v.view(texts, rows, *v.shape[1:]).to(values.dtype)
        return attend(q, keys, values, self.bias, self.memory.config)


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Keep rows [n, ...] in these slots of a cache [pages, page_size, ...]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, config: LayerConfig) -> Tensor:
    """q [texts * rows, heads, dim] over keys and values [texts, columns, kv_heads, dim]; query heads that share a key
    head stand as further rows under it."""
    (texts, columns, kv_heads, dim), rows = keys.shape, bias.shape[1]
    share = q.shape[-2] // kv_heads
    folded = q.view(texts, rows, kv_heads, share, dim).transpose(1, 2).reshape(texts, kv_heads, -1, dim)
    shared = bias[:, :, None].expand(-1, -1, share, -1).reshape(texts, 1, rows * share, columns)
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(
            folded.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), shared, scale=config.scale
        )
    out = out.view(texts, kv_heads, rows, share, dim).transpose(1, 2)
    return out.reshape(texts * rows, -1, dim).to(q.dtype)
