"""A head's own layers in the target's pages, and attention over them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.kv.cache import KVCache, LayerShape, slots_of
from foretell.models.draft_heads import BlockConfig, DraftHead, HeadConfig, LayerConfig, MedusaConfig
from foretell.models.draft_heads.base import local_layer_config
from foretell.models.draft_heads.config import DistilledConfig, EagleConfig, MtpConfig
from foretell.models.sharding import Shard
from foretell.types import Sequence

# Not cuDNN's, which makes a plan for each new shape, a tenth of a second each.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class GraphKV:
    """Keys and values of each layer, [texts, columns, kv_heads, dim]: places of the text, and behind them guesses.

    It is a copy: what is guessed is good for guesses only, and is never written to the pages.
    """

    def __init__(self, keys: Several[Tensor], values: Several[Tensor], config: LayerConfig, pages: Tensor) -> None:
        self.keys, self.values = ([t[pages].flatten(1, 2) for t in layers] for layers in (keys, values))
        self.config = config
        self.columns = 0 if not self.keys else self.keys[0].shape[1]

    def context_mask(self, text: Tensor, columns: int, depths: Tensor, hidden: int) -> Tensor:
        """Which places of a text are seen by rows `depths` behind its end, [texts, rows, columns].

        Of a text those from `hidden` up to `text` are.
        """
        column, end = torch.arange(columns, device=text.device), text[:, None, None]
        seen = (column >= hidden) & (column < end)
        if self.config.window is None:
            return seen.expand(-1, len(depths), -1)
        return seen & (column > end + depths[:, None] - self.config.window)

    def window_mask(self, depths: Tensor, others: Tensor) -> Tensor:
        """Whether a window lets rows of some depths see those of others, [rows, others]."""
        back = depths[:, None] - others
        return back >= 0 if self.config.window is None else (back >= 0) & (back < self.config.window)

    def mask_bias(self, seen: Tensor) -> Tensor:
        """What is added to scores where a row may look, [texts, rows, columns], and where not."""
        nothing = torch.zeros(seen.shape, dtype=self.keys[0].dtype, device=seen.device)
        return nothing.masked_fill(~seen, float("-inf"))


class GraphAttention:
    """Attention of as many new rows for each text, which it remembers from the column `first` on."""

    def __init__(self, memory: GraphKV, bias: Tensor, first: int) -> None:
        """`bias` [texts, rows, columns]."""
        self.kv, self.bias, self.first = memory, bias, first

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        texts, rows = self.bias.shape[:2]
        own = slice(self.first, self.first + rows)
        keys[:, own] = k.view(texts, rows, *k.shape[1:]).to(keys.dtype)
        values[:, own] = v.view(texts, rows, *v.shape[1:]).to(values.dtype)
        return attend(q, keys, values, self.bias, self.kv.config)


def store_rows(new: Tensor, cache: Tensor, slots: Tensor) -> None:
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


SPARE_SLOTS = 128  # slots


def head_layer_shapes(config: HeadConfig, shard: Shard | None = None) -> tuple[LayerShape, ...]:
    """The layers a head keeps in the target's cache: keys and values of its own, and the feature of each place; of one
    of several ranks those of its part."""
    layers, features = _kv_layers(config, shard is not None)
    # A block's own keys and values are dropped after its pass; a part's are never in pages.
    spare = SPARE_SLOTS if isinstance(config, BlockConfig) and shard is None else 0
    own = (
        LayerShape(local_layer_config(config.layer, shard).kv_heads, config.layer.head_dim, scratch_slots=spare),
    ) * layers
    columns = config.layer.width if shard is None else len(shard.split(config.layer.width))
    return own + ((LayerShape(1, columns, has_values=False),) if features else ())


def _kv_layers(config: HeadConfig, split: bool) -> tuple[int, bool]:
    """Layers whose keys and values a head keeps, and whether it keeps the feature of each place. Of one that is split
    every rank keeps its part of it, until the first one says that places are to be read."""
    if isinstance(config, MedusaConfig):
        return 0, True
    assert isinstance(config, EagleConfig | MtpConfig | BlockConfig | DistilledConfig), "there are no other kinds"
    if isinstance(config, DistilledConfig):  # it looks at no feature
        return config.layers, False
    return config.layers, split or not isinstance(config, BlockConfig)


class HeadPages:
    """What one head keeps of each place; the pages and their holders are the target's."""

    def __init__(self, cache: KVCache, first: int, layers: int, features: bool) -> None:
        """Its layers stand in the cache from `first` on."""
        self.first = first
        self.page_size, self.device = cache.page_size, cache.keys[first].device
        self.keys, self.values = cache.keys[first : first + layers], cache.values[first : first + layers]
        self.state_cache = cache.keys[first + layers] if features else None

    @classmethod
    def of(cls, head: DraftHead[Any], cache: KVCache, first: int) -> HeadPages:
        return cls(cache, first, *_kv_layers(head.config, head.shard is not None))

    @property
    def caches(self) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Keys and values of each layer, and the features."""
        return self.keys, self.values, self.state_cache

    def slots(self, seq: Sequence, start: int, stop: int) -> list[int]:
        """Those of places `start` to `stop`."""
        return slots_of(seq.pages, self.page_size, start, stop)

    def store_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [n, kv_heads, dim]."""
        store_rows(keys, self.keys[layer], slots)
        store_rows(values, self.values[layer], slots)

    def store_hidden_states(self, slots: Tensor, features: Tensor) -> None:
        """Keep features [n, width]."""
        assert self.state_cache is not None, "this head keeps features"
        store_rows(features[:, None], self.state_cache, slots)

    def hidden_states(self, slots: Tensor) -> Tensor:
        """[n, width]."""
        assert self.state_cache is not None, "this head keeps features"
        return self.state_cache.view(-1, self.state_cache.shape[-1]).index_select(0, slots)

    def hidden_states_cpu(self, slots: list[int]) -> Tensor:
        """The same on a CPU, of a few places: numpy has them sooner than torch. Those of one text alone are good until
        others are asked for: to copy them is sooner done than to ask either."""
        if len(slots) == 1:
            room, target, source, size = self._single_row
            ctypes.memmove(target, source + slots[0] * size, size)
            return room
        assert self.state_cache is not None, "this head keeps features"
        return torch.from_numpy(self.state_cache.numpy().reshape(-1, self.state_cache.shape[-1])[slots])

    @cached_property
    def _single_row(self) -> tuple[Tensor, int, int, int]:
        """Room for one place's features, its address, where those of all slots lie, and the bytes of each."""
        features = self.state_cache
        assert features is not None and features.is_contiguous(), "as a cache is made"
        room = torch.empty(1, features.shape[-1], dtype=features.dtype)
        return room, room.data_ptr(), features.data_ptr(), room.nbytes

    def gather(self, texts: list[list[int]], columns: int) -> DraftKV:
        """All places of some texts, by their pages, as columns, `columns` in all; what is written there is good for
        guesses only."""
        run = self._contiguous_run(texts[0], columns) if len(texts) == 1 else None
        if run is not None:
            return DraftKV([_view(t, run, columns) for t in self.keys], [_view(t, run, columns) for t in self.values])
        wanted = -(-columns // self.page_size)
        rows = [pages[:wanted] + pages[:1] * (wanted - len(pages)) for pages in texts]
        pages = torch.tensor(rows, device=self.device)
        return DraftKV([t[pages].flatten(1, 2) for t in self.keys], [t[pages].flatten(1, 2) for t in self.values])

    def _contiguous_run(self, pages: list[int], columns: int) -> slice | None:
        """The pages as a slice, if they lie side by side and have room for all columns: then nothing is copied."""
        count = -(-columns // self.page_size)
        if count > len(pages) or pages[count - 1] - pages[0] != count - 1:
            return None
        return slice(pages[0], pages[0] + count) if pages[:count] == list(range(pages[0], pages[0] + count)) else None


def _view(cache: Tensor, run: slice, columns: int) -> Tensor:
    return cache[run].view(1, -1, *cache.shape[2:])[:, :columns]


@dataclass(frozen=True)
class DraftKV:
    """For each layer keys and values of several texts, [texts, columns, kv_heads, dim]."""

    keys: list[Tensor]
    values: list[Tensor]


PrefillSpan = tuple[list[int], int, int]  # a text's pages, and of its places those from the one to the other


@dataclass(frozen=True)
class PrefillAttention:
    """Attention of places that are read, over those before them; what a head of several layers needs."""

    pages: HeadPages
    config: LayerConfig
    spans: list[PrefillSpan]
    slots: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pages.store_kv(layer, self.slots, k, v)
        rows = [stop - start for _, start, stop in self.spans]
        pairs = zip(self.spans, torch.split(q, rows), strict=True)
        return torch.cat([self._sequence(layer, part, *span) for span, part in pairs])

    def _sequence(self, layer: int, q: Tensor, pages: list[int], start: int, stop: int) -> Tensor:
        slots = torch.tensor(slots_of(pages, self.pages.page_size, 1, stop), device=q.device)
        keys, values = (t.flatten(0, 1)[slots] for t in (self.pages.keys[layer], self.pages.values[layer]))
        column, row = torch.arange(1, stop, device=q.device), torch.arange(start, stop, device=q.device)[:, None]
        seen = column <= row
        if self.config.window is not None:
            seen &= column > row - self.config.window
        q, keys, values = (t.to(self.pages.keys[layer].dtype).transpose(0, 1)[None] for t in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, seen, scale=self.config.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class DraftAttention:
    """Attention of some new rows, as many for each text, over what is remembered; it remembers the rows, too.

    Each row sees the text's columns `hidden` .. `text`, and of the guesses behind them those that `seen` says, [rows,
    guesses] or [texts, rows, guesses]; the rows themselves are the last of these. `reach` tells how far behind the text
    each row stands; guesses stand in any order, and a window over them is the affair of `seen`.
    """

    kv: DraftKV
    config: LayerConfig
    lengths: list[int]
    draft_mask: Tensor
    first_position: int = 0
    depths: tuple[int, ...] = (0,)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        rows, texts = self.draft_mask.shape[-2], len(self.lengths)
        k, v = (x.to(keys.dtype).view(texts, rows, *x.shape[1:]) for x in (k, v))
        if texts == 1:
            return self._single(q, k[0], v[0], keys, values)
        columns = self._columns(keys.device)
        keys[torch.arange(texts, device=keys.device)[:, None], columns] = k
        values[torch.arange(texts, device=keys.device)[:, None], columns] = v
        return self._attend(q, keys, values, self._mask(0, keys.shape[1], keys.device))

    def _single(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One text needs no padding, and mostly no mask."""
        stop = self.lengths[0] + self.draft_mask.shape[-1]
        at, first = stop - self.draft_mask.shape[-2], self._first(0)
        keys[0, at:stop], values[0, at:stop] = k, v
        plain = self.config.window is None or len(self.depths) == 1
        mask = None if plain and bool(self.draft_mask.all()) else self._mask(first, stop, keys.device)
        return self._attend(q, keys[:, first:stop], values[:, first:stop], mask)

    def _first(self, index: int) -> int:
        """The first column that any row of a text sees."""
        window, text = self.config.window, self.lengths[index]
        return (
            self.first_position
            if window is None
            else max(self.first_position, min(text, text + min(self.depths) + 1 - window))
        )

    def _columns(self, device: torch.device) -> Tensor:
        """Where the rows are remembered, [texts, rows]."""
        rows, guesses = self.draft_mask.shape[-2:]
        behind = torch.arange(guesses - rows, guesses, device=device)
        return torch.tensor(self.lengths, device=device)[:, None] + behind

    def _mask(self, first: int, stop: int, device: torch.device) -> Tensor:
        """True where a row may look, [texts, 1, rows, columns]."""
        text = torch.tensor(self.lengths, device=device)[:, None, None]
        column = torch.arange(first, stop, device=device)
        rows, guesses = self.draft_mask.shape[-2:]
        mask = ((column >= self.first_position) & (column < text)).expand(-1, rows, -1).clone()
        if self.config.window is not None:
            reach = torch.tensor(self.depths, device=device)[:, None]
            mask &= column > text + reach - self.config.window
        behind = (column - text).clamp(0, guesses - 1).expand(-1, rows, -1)
        own = self.draft_mask.to(device).expand(len(self.lengths), -1, -1).gather(2, behind)
        mask |= own & (column >= text) & (column < text + guesses)
        return mask[:, None]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Query heads that share a key head stand as further rows under it."""
        (texts, _, kv_heads, dim), rows = keys.shape, self.draft_mask.shape[-2]
        share = q.shape[-2] // kv_heads
        folded = q.view(texts, rows, kv_heads, share, dim).transpose(1, 2).reshape(texts, kv_heads, -1, dim)
        if mask is not None:
            mask = mask.repeat_interleave(share, 2)
        out = F.scaled_dot_product_attention(
            folded.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), mask, scale=self.config.scale
        )
        out = out.view(texts, kv_heads, rows, share, dim).transpose(1, 2)
        return out.reshape(texts * rows, -1, dim).to(q.dtype)
