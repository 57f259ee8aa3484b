"""Paged attention, the torch reference: new rows of several sequences attend to the KV cache of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.kv_types import decode_kv

FOLD_ROWS = 32  # up to this many rows the query heads of a KV head are folded into rows: one matrix product


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a step: its tokens `start` .. `start + rows`, from row `first` of the batch."""

    first: int
    rows: int
    start: int
    pages: tuple[int, ...]
    parents: tuple[int, ...] = ()  # of the draft tree's nodes, which are the last rows; empty for a chain

    @property
    def stop(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True)
class AttentionLayout:
    """Attention settings that all layers of a model share."""

    page_size: int
    queries_per_kv_head: int  # query heads per KV head
    windows: frozenset[int | None]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    by_window: tuple[tuple[int | None, int], ...] = ()  # `queries_per_kv_head` by window, if layers differ

    def group_size(self, window: int | None) -> int:
        """Return the query heads per KV head of layers with this window."""
        return dict(self.by_window).get(window, self.queries_per_kv_head)


@dataclass(frozen=True)
class SpanGroup:
    """Sequences with the same number of rows that attend in one call."""

    rows: Tensor | slice  # rows of the batch, sequence by sequence
    num_sequences: int
    num_rows: int
    pages: Tensor | slice  # the same number per sequence; a slice if they are contiguous
    length: int  # keys per row, before masking
    masks: dict[int | None, Tensor | None]  # added to the scores, by window

    @property
    def is_folded(self) -> bool:
        """Return whether the query heads of a KV head are folded into rows."""
        return self.num_rows <= FOLD_ROWS


def group_spans(spans: list[Span], layout: AttentionLayout) -> list[SpanGroup]:
    """Group spans with the same number of rows and a similar context length."""
    batches: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        # Contexts within a power of two, so that padding is below half.
        key = (span.rows, len(span.pages).bit_length()) if span.rows <= FOLD_ROWS else (span.first, -1)
        batches.setdefault(key, []).append(span)
    return [_make_group(batch, layout) for batch in batches.values()]


def _make_group(batch: list[Span], layout: AttentionLayout) -> SpanGroup:
    rows, max_pages = batch[0].rows, max(len(span.pages) for span in batch)
    length = batch[0].stop if len(batch) == 1 else max_pages * layout.page_size
    masks = {window: _mask(batch, length, window, layout) for window in layout.windows}
    return SpanGroup(_rows(batch, layout), len(batch), rows, _pages(batch, max_pages, layout), length, masks)


def _rows(batch: list[Span], layout: AttentionLayout) -> Tensor | slice:
    first, rows = batch[0].first, batch[0].rows
    if all(b.first == a.first + rows for a, b in zip(batch, batch[1:], strict=False)):
        return slice(first, first + rows * len(batch))
    return torch.tensor([span.first + row for span in batch for row in range(rows)], device=layout.device)


def _pages(batch: list[Span], max_pages: int, layout: AttentionLayout) -> Tensor | slice:
    pages = batch[0].pages
    if (
        len(batch) == 1
        and pages[-1] - pages[0] == max_pages - 1
        and list(pages) == list(range(pages[0], pages[-1] + 1))
    ):
        return slice(pages[0], pages[-1] + 1)
    padded = [page for span in batch for page in (*span.pages, *span.pages[:1] * (max_pages - len(span.pages)))]
    return torch.tensor(padded, device=layout.device)


def _mask(batch: list[Span], length: int, window: int | None, layout: AttentionLayout) -> Tensor | None:
    """Return 0 for visible keys and -inf for masked ones, [sequences, 1, rows, length]; None if all are visible."""
    rows = batch[0].rows
    if len(batch) == 1 and rows == 1 and (window is None or length <= window):
        return None
    position = torch.tensor([span.start for span in batch])[:, None, None] + torch.arange(rows)[:, None]
    key_position = torch.arange(length).expand(len(batch), 1, length).clone()
    visible = key_position <= position
    for i, span in enumerate(batch):
        if span.parents:
            _apply_tree_mask(visible[i], position[i], key_position[i], span)
    if window is not None:
        visible &= key_position > position - window
    mask = torch.zeros(visible.shape, dtype=layout.dtype).masked_fill_(~visible, float("-inf"))[:, None]
    mask = mask.repeat_interleave(layout.group_size(window), dim=2) if rows <= FOLD_ROWS else mask
    return mask.to(layout.device)


def _apply_tree_mask(visible: Tensor, position: Tensor, key_position: Tensor, span: Span) -> None:
    """Make the context, their ancestors and themselves visible to tree nodes, at the positions of their depths."""
    nodes = len(span.parents)
    root = span.stop - nodes - 1
    tree = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node, parent in enumerate(span.parents):
        if parent >= 0:
            tree[node] = tree[parent]
        tree[node, node] = True
    visible[-nodes:, root + 1 : span.stop] = tree
    position[-nodes:, 0] = key_position[0, root + 1 : span.stop] = root + tree.sum(-1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: list[SpanGroup],
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attend queries [n, heads, dim] to keys and values [pages, page_size, kv_heads, width] -> [n, heads * dim].

    `width` is `dim`, or `stored_width` of it if the cache has a data type of its own.
    """
    if len(groups) == 1:
        return _attend_group(queries, keys, values, groups[0], scale, window, softcap)
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    for group in groups:
        out[group.rows] = _attend_group(queries[group.rows], keys, values, group, scale, window, softcap)
    return out


def _attend_group(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: SpanGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    kv_heads, dim = keys.shape[2], q.shape[2]
    group_size = q.shape[1] // kv_heads
    k, v = (decode_kv(_gather_pages(cache, group), q.dtype) for cache in (keys, values))
    mask = group.masks[window]
    q = q.view(group.num_sequences, group.num_rows, kv_heads, group_size, dim)
    if group.is_folded:
        q = q.transpose(1, 2).reshape(group.num_sequences, kv_heads, -1, dim)
        out = masked_attention(q, k, v, mask, scale, softcap)
        out = out.view(group.num_sequences, kv_heads, group.num_rows, group_size, dim).transpose(1, 2)
    else:
        heads = [q[:, :, :, i].transpose(1, 2) for i in range(group_size)]
        outs = [masked_attention(head, k, v, mask, scale, softcap) for head in heads]
        out = torch.stack(outs, 3).transpose(1, 2)
    return out.reshape(group.num_sequences * group.num_rows, -1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend q [..., rows, dim] to k, v [..., length, dim]; `softcap` bounds scores by cap * tanh(score / cap)."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v


def _gather_pages(cache: Tensor, group: SpanGroup) -> Tensor:
    """Return the pages of the group concatenated, [sequences, kv_heads, length, dim]."""
    _, _, kv_heads, dim = cache.shape
    if isinstance(group.pages, slice):
        pages = cache[group.pages]
    else:
        pages = cache.view(cache.shape[0], -1).index_select(0, group.pages)
    return pages.view(group.num_sequences, -1, kv_heads, dim)[:, : group.length].transpose(1, 2)
