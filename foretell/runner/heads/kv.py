"""KV cache layers of draft heads, which group the pages of the target, and attention over them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.kernels.kv_types import decode_kv, encode_kv
from foretell.kv.cache import KVCache, LayerShape, slots_of
from foretell.models.draft_heads import AssistantConfig, BlockConfig, DraftHead, HeadConfig, LayerConfig, MedusaConfig
from foretell.models.draft_heads.base import local_layer_config
from foretell.models.draft_heads.config import DistilledConfig, EagleConfig, MtpConfig
from foretell.models.sharding import Shard
from foretell.types import Sequence

# Without cuDNN, which takes a tenth of a second to plan each new shape.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class GraphKV:
    """Keys and values gathered from pages, [sequences, columns, kv_heads, dim] per layer, followed by draft columns.

    It is a copy: the KV of draft tokens serves the draft only and is never written to the pages.
    """

    def __init__(self, keys: Several[Tensor], values: Several[Tensor], config: LayerConfig, pages: Tensor) -> None:
        self.keys, self.values = ([t[pages].flatten(1, 2) for t in layers] for layers in (keys, values))
        self.config = config
        self.columns = 0 if not self.keys else self.keys[0].shape[1]

    def context_mask(self, lengths: Tensor, columns: int, depths: Tensor, first_position: int) -> Tensor:
        """Return which context positions rows at `depths` after the end attend to, [sequences, rows, columns].

        Visible are the positions from `first_position` to `lengths`, within the window if there is one.
        """
        column, end = torch.arange(columns, device=lengths.device), lengths[:, None, None]
        visible = (column >= first_position) & (column < end)
        if self.config.window is None:
            return visible.expand(-1, len(depths), -1)
        return visible & (column > end + depths[:, None] - self.config.window)

    def window_mask(self, depths: Tensor, others: Tensor) -> Tensor:
        """Return whether rows at `depths` attend to draft tokens at `others`, [rows, others]."""
        back = depths[:, None] - others
        return back >= 0 if self.config.window is None else (back >= 0) & (back < self.config.window)

    def mask_bias(self, mask: Tensor) -> Tensor:
        """Turn a mask [sequences, rows, columns] into an additive bias: 0 where visible, else -inf."""
        bias = torch.zeros(mask.shape, dtype=self.keys[0].dtype, device=mask.device)
        return bias.masked_fill(~mask, float("-inf"))


class GraphAttention:
    """Attention of new draft rows, the same number per sequence; their KV is stored from column `first` on."""

    def __init__(self, kv: GraphKV, bias: Tensor, first: int) -> None:
        """`bias` [sequences, rows, columns] is added to the attention scores."""
        self.kv, self.bias, self.first = kv, bias, first

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        sequences, rows = self.bias.shape[:2]
        own = slice(self.first, self.first + rows)
        keys[:, own] = k.view(sequences, rows, *k.shape[1:]).to(keys.dtype)
        values[:, own] = v.view(sequences, rows, *v.shape[1:]).to(values.dtype)
        return attend(q, keys, values, self.bias, self.kv.config)


def store_rows(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write rows [n, ...] to these slots of a cache [pages, page_size, ...]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, encode_kv(new, cache.dtype))


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, config: LayerConfig) -> Tensor:
    """Attend with q [sequences * rows, heads, dim] to keys and values [sequences, columns, kv_heads, dim].

    Query heads that group a KV head (GQA) become further rows of it.
    """
    (sequences, columns, kv_heads, dim), rows = keys.shape, bias.shape[1]
    group = q.shape[-2] // kv_heads
    folded = q.view(sequences, rows, kv_heads, group, dim).transpose(1, 2).reshape(sequences, kv_heads, -1, dim)
    shared = bias[:, :, None].expand(-1, -1, group, -1).reshape(sequences, 1, rows * group, columns)
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(
            folded.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), shared, scale=config.scale
        )
    out = out.view(sequences, kv_heads, rows, group, dim).transpose(1, 2)
    return out.reshape(sequences * rows, -1, dim).to(q.dtype)


SPARE_SLOTS = 128  # KV slots for the draft blocks of block heads


def head_layer_shapes(config: HeadConfig, shard: Shard | None = None) -> tuple[LayerShape, ...]:
    """Return the layers that a head, or its shard, needs in the target's KV cache.

    They are its own keys and values, and a layer for the hidden states of each position.
    """
    layers, keeps_states = _kv_layers(config, shard is not None)
    # Keys and values of a block are dropped after its forward pass; those of a shard are never in pages.
    spare = SPARE_SLOTS if isinstance(config, BlockConfig) and shard is None else 0
    own = (
        LayerShape(local_layer_config(config.layer, shard).kv_heads, config.layer.head_dim, scratch_slots=spare),
    ) * layers
    columns = config.layer.width if shard is None else len(shard.split(config.layer.width))
    return own + ((LayerShape(1, columns, has_values=False),) if keeps_states else ())


def _kv_layers(config: HeadConfig, split: bool) -> tuple[int, bool]:
    """Return the number of KV layers of a head, and whether it stores the hidden states of each position.

    Every rank of a sharded head stores its part of them until the leader requests the prefill.
    """
    if isinstance(config, AssistantConfig):  # it attends to the target's KV, and drafts from the last hidden state
        return 0, False
    if isinstance(config, MedusaConfig):
        return 0, True
    assert isinstance(config, EagleConfig | MtpConfig | BlockConfig | DistilledConfig), "there are no other kinds"
    if isinstance(config, DistilledConfig):  # it conditions on tokens only
        return config.layers, False
    return config.layers, split or not isinstance(config, BlockConfig)


class HeadPages:
    """The KV cache layers of one head. The pages are allocated by the target."""

    def __init__(self, cache: KVCache, first: int, layers: int, keeps_states: bool) -> None:
        """`first` is the index of the head's first layer in the cache."""
        self.first = first
        self.page_size, self.device, self.dtype = cache.page_size, cache.keys[0].device, cache.dtype
        self.keys, self.values = cache.keys[first : first + layers], cache.values[first : first + layers]
        self.hidden_state_cache = cache.keys[first + layers] if keeps_states else None

    @classmethod
    def of(cls, head: DraftHead[Any], cache: KVCache, first: int) -> HeadPages:
        return cls(cache, first, *_kv_layers(head.config, head.shard is not None))

    @property
    def caches(self) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Return keys and values of each layer, and the cache of hidden states."""
        return self.keys, self.values, self.hidden_state_cache

    def slots(self, seq: Sequence, start: int, stop: int) -> list[int]:
        """Return the slots of positions `start` to `stop`."""
        return slots_of(seq.pages, self.page_size, start, stop)

    def store_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, dim]."""
        store_rows(keys, self.keys[layer], slots)
        store_rows(values, self.values[layer], slots)

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None:
        """Store hidden states [n, width]."""
        assert self.hidden_state_cache is not None, "this head stores hidden states"
        store_rows(states[:, None], self.hidden_state_cache, slots)

    def hidden_states(self, slots: Tensor) -> Tensor:
        """Return the stored hidden states [n, width]."""
        assert self.hidden_state_cache is not None, "this head stores hidden states"
        return self.hidden_state_cache.view(-1, self.hidden_state_cache.shape[-1]).index_select(0, slots)

    def hidden_states_cpu(self, slots: list[int]) -> Tensor:
        """Return the stored hidden states of a few slots on a CPU, where numpy is faster than torch.

        A single row is copied with memmove, which is faster than either; it is valid until the next call.
        """
        if len(slots) == 1:
            row, target, source, size = self._single_row
            ctypes.memmove(target, source + slots[0] * size, size)
            return row
        assert self.hidden_state_cache is not None, "this head stores hidden states"
        return torch.from_numpy(self.hidden_state_cache.numpy().reshape(-1, self.hidden_state_cache.shape[-1])[slots])

    @cached_property
    def _single_row(self) -> tuple[Tensor, int, int, int]:
        """Return a buffer for one row, its address, the address of all rows, and the bytes of a row."""
        cache = self.hidden_state_cache
        assert cache is not None and cache.is_contiguous(), "a cache is contiguous"
        row = torch.empty(1, cache.shape[-1], dtype=cache.dtype)
        return row, row.data_ptr(), cache.data_ptr(), row.nbytes

    def gather(self, page_lists: list[list[int]], columns: int) -> DraftKV:
        """Return the first `columns` positions of some sequences, given their pages; drafts may write there.

        It is a copy where the cache has a data type of its own, and where pages are not consecutive.
        """
        run = self._contiguous_run(page_lists[0], columns) if len(page_lists) == 1 else None
        if run is not None:
            return self._draft_kv(lambda tensor: _view(tensor, run, columns))
        wanted = -(-columns // self.page_size)
        rows = [pages[:wanted] + pages[:1] * (wanted - len(pages)) for pages in page_lists]
        pages = torch.tensor(rows, device=self.device)
        return self._draft_kv(lambda tensor: tensor[pages].flatten(1, 2))

    def _draft_kv(self, gather: Callable[[Tensor], Tensor]) -> DraftKV:
        keys, values = ([decode_kv(gather(t), self.dtype) for t in tensors] for tensors in (self.keys, self.values))
        return DraftKV(keys, values, self.keys[0].dtype if self.keys else self.dtype)

    def _contiguous_run(self, pages: list[int], columns: int) -> slice | None:
        """Return the pages as a slice if they are consecutive and hold all columns; then nothing is copied."""
        count = -(-columns // self.page_size)
        if count > len(pages) or pages[count - 1] - pages[0] != count - 1:
            return None
        return slice(pages[0], pages[0] + count) if pages[:count] == list(range(pages[0], pages[0] + count)) else None


def _view(cache: Tensor, run: slice, columns: int) -> Tensor:
    return cache[run].view(1, -1, *cache.shape[2:])[:, :columns]


@dataclass(frozen=True)
class DraftKV:
    """Keys and values of several sequences, [sequences, columns, kv_heads, dim] per layer."""

    keys: list[Tensor]
    values: list[Tensor]
    kv_dtype: torch.dtype  # of the cache they come from; drafts are rounded to it, too


PrefillSpan = tuple[list[int], int, int]  # pages of a sequence, first position, end position


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of prefilled positions, for heads with several layers."""

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
        stored = (self.pages.keys[layer], self.pages.values[layer])
        keys, values = (decode_kv(tensor.flatten(0, 1)[slots], self.pages.dtype) for tensor in stored)
        column, row = torch.arange(1, stop, device=q.device), torch.arange(start, stop, device=q.device)[:, None]
        mask = column <= row
        if self.config.window is not None:
            mask &= column > row - self.config.window
        q, keys, values = (t.to(self.pages.dtype).transpose(0, 1)[None] for t in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.config.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class DraftAttention:
    """Attention of new draft rows, the same number per sequence, over the context and the draft; it stores their KV.

    A row attends to the context columns `first_position` to `lengths`, and to the draft tokens after them that
    `draft_mask` [rows, drafted] or [sequences, rows, drafted] allows; the rows themselves are the last ones. `depths`
    are the distances of the rows from the end of the context. Draft tokens may come in any order, so `draft_mask` has
    to apply the window among them.
    """

    kv: DraftKV
    config: LayerConfig
    lengths: list[int]
    draft_mask: Tensor
    first_position: int = 0
    depths: tuple[int, ...] = (0,)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        rows, sequences = self.draft_mask.shape[-2], len(self.lengths)
        k, v = (decode_kv(encode_kv(x, self.kv.kv_dtype), keys.dtype) for x in (k, v))
        k, v = (x.view(sequences, rows, *x.shape[1:]) for x in (k, v))
        if sequences == 1:
            return self._single(q, k[0], v[0], keys, values)
        columns = self._columns(keys.device)
        keys[torch.arange(sequences, device=keys.device)[:, None], columns] = k
        values[torch.arange(sequences, device=keys.device)[:, None], columns] = v
        return self._attend(q, keys, values, self._mask(0, keys.shape[1], keys.device))

    def _single(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend for one sequence, which needs no padding and mostly no mask."""
        stop = self.lengths[0] + self.draft_mask.shape[-1]
        at, first = stop - self.draft_mask.shape[-2], self._first(0)
        keys[0, at:stop], values[0, at:stop] = k, v
        plain = self.config.window is None or len(self.depths) == 1
        mask = None if plain and bool(self.draft_mask.all()) else self._mask(first, stop, keys.device)
        return self._attend(q, keys[:, first:stop], values[:, first:stop], mask)

    def _first(self, index: int) -> int:
        """Return the first column that any row of a sequence attends to."""
        window, length = self.config.window, self.lengths[index]
        return (
            self.first_position
            if window is None
            else max(self.first_position, min(length, length + min(self.depths) + 1 - window))
        )

    def _columns(self, device: torch.device) -> Tensor:
        """Return the columns that store the rows, [sequences, rows]."""
        rows, drafted = self.draft_mask.shape[-2:]
        offset = torch.arange(drafted - rows, drafted, device=device)
        return torch.tensor(self.lengths, device=device)[:, None] + offset

    def _mask(self, first: int, stop: int, device: torch.device) -> Tensor:
        """Return the attention mask [sequences, 1, rows, columns]."""
        length = torch.tensor(self.lengths, device=device)[:, None, None]
        column = torch.arange(first, stop, device=device)
        rows, drafted = self.draft_mask.shape[-2:]
        mask = ((column >= self.first_position) & (column < length)).expand(-1, rows, -1).clone()
        if self.config.window is not None:
            depths = torch.tensor(self.depths, device=device)[:, None]
            mask &= column > length + depths - self.config.window
        offset = (column - length).clamp(0, drafted - 1).expand(-1, rows, -1)
        own = self.draft_mask.to(device).expand(len(self.lengths), -1, -1).gather(2, offset)
        mask |= own & (column >= length) & (column < length + drafted)
        return mask[:, None]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; query heads that group a KV head (GQA) become further rows of it."""
        (sequences, _, kv_heads, dim), rows = keys.shape, self.draft_mask.shape[-2]
        group = q.shape[-2] // kv_heads
        folded = q.view(sequences, rows, kv_heads, group, dim).transpose(1, 2).reshape(sequences, kv_heads, -1, dim)
        if mask is not None:
            mask = mask.repeat_interleave(group, 2)
        out = F.scaled_dot_product_attention(
            folded.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), mask, scale=self.config.scale
        )
        out = out.view(sequences, kv_heads, rows, group, dim).transpose(1, 2)
        return out.reshape(sequences * rows, -1, dim).to(q.dtype)
