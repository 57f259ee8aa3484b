"""Attention over pages: some new rows of several sequences over what each has cached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FOLD_ROWS = 32  # up to here the query heads of a group are folded into rows: one product instead of several


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a step: tokens `start` .. `start + rows` of it, at `first` in the batch."""

    first: int
    rows: int
    start: int
    pages: tuple[int, ...]
    parents: tuple[int, ...] = ()  # of the draft's nodes, which are the last rows; empty for a chain

    @property
    def stop(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True)
class AttentionLayout:
    """What all layers of a model have in common as far as attention goes."""

    page_size: int
    queries_per_kv_head: int  # query heads to a key head
    windows: frozenset[int | None]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True)
class SpanGroup:
    """Sequences attended in one call, with as many rows each."""

    rows: Tensor | slice  # of the batch, sequence by sequence
    num_sequences: int
    num_rows: int
    pages: Tensor | slice  # sequence by sequence, as many for each; a slice where they lie side by side
    length: int  # keys each row is shown; the mask hides those it may not see
    masks: dict[int | None, Tensor | None]  # by window: added to the scores

    @property
    def is_folded(self) -> bool:
        """Whether the query heads that share a key head stand as further rows under it."""
        return self.num_rows <= FOLD_ROWS


def group_spans(spans: list[Span], layout: AttentionLayout) -> list[SpanGroup]:
    """Put spans with as many rows and about as long a context together."""
    batches: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        # Contexts of one power of two: the padding stays under half.
        key = (span.rows, len(span.pages).bit_length()) if span.rows <= FOLD_ROWS else (span.first, -1)
        batches.setdefault(key, []).append(span)
    return [_make_group(batch, layout) for batch in batches.values()]


def _make_group(batch: list[Span], layout: AttentionLayout) -> SpanGroup:
    rows, most = batch[0].rows, max(len(span.pages) for span in batch)
    length = batch[0].stop if len(batch) == 1 else most * layout.page_size
    masks = {window: _mask(batch, length, window, layout) for window in layout.windows}
    return SpanGroup(_rows(batch, layout), len(batch), rows, _pages(batch, most, layout), length, masks)


def _rows(batch: list[Span], layout: AttentionLayout) -> Tensor | slice:
    first, rows = batch[0].first, batch[0].rows
    if all(b.first == a.first + rows for a, b in zip(batch, batch[1:], strict=False)):
        return slice(first, first + rows * len(batch))
    return torch.tensor([span.first + row for span in batch for row in range(rows)], device=layout.device)


def _pages(batch: list[Span], most: int, layout: AttentionLayout) -> Tensor | slice:
    pages = batch[0].pages
    if len(batch) == 1 and pages[-1] - pages[0] == most - 1 and list(pages) == list(range(pages[0], pages[-1] + 1)):
        return slice(pages[0], pages[-1] + 1)
    padded = [page for span in batch for page in (*span.pages, *span.pages[:1] * (most - len(span.pages)))]
    return torch.tensor(padded, device=layout.device)


def _mask(batch: list[Span], length: int, window: int | None, layout: AttentionLayout) -> Tensor | None:
    """0 where a row may look, -inf where not, [sequences, 1, rows, length]; None where every row sees every key."""
    rows = batch[0].rows
    if len(batch) == 1 and rows == 1 and (window is None or length <= window):
        return None
    position = torch.tensor([span.start for span in batch])[:, None, None] + torch.arange(rows)[:, None]
    key_position = torch.arange(length).expand(len(batch), 1, length).clone()
    seen = key_position <= position
    for i, span in enumerate(batch):
        if span.parents:
            _apply_tree_mask(seen[i], position[i], key_position[i], span)
    if window is not None:
        seen &= key_position > position - window
    mask = torch.zeros(seen.shape, dtype=layout.dtype).masked_fill_(~seen, float("-inf"))[:, None]
    mask = mask.repeat_interleave(layout.queries_per_kv_head, dim=2) if rows <= FOLD_ROWS else mask
    return mask.to(layout.device)


def _apply_tree_mask(seen: Tensor, position: Tensor, key_position: Tensor, span: Span) -> None:
    """Let the nodes of a tree see the sequence, their ancestors and themselves, at the position of their depth."""
    nodes = len(span.parents)
    root = span.stop - nodes - 1
    tree = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node, parent in enumerate(span.parents):
        if parent >= 0:
            tree[node] = tree[parent]
        tree[node, node] = True
    seen[-nodes:, root + 1 : span.stop] = tree
    position[-nodes:, 0] = key_position[0, root + 1 : span.stop] = root + tree.sum(-1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, groups: list[SpanGroup], scale: float, window: int | None
) -> Tensor:
    """queries [n, heads, dim] over keys and values [pages, page_size, kv_heads, dim] -> [n, heads * dim]."""
    if len(groups) == 1:
        return _attend_group(queries, keys, values, groups[0], scale, window)
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    for group in groups:
        out[group.rows] = _attend_group(queries[group.rows], keys, values, group, scale, window)
    return out


def _attend_group(
    q: Tensor, keys: Tensor, values: Tensor, group: SpanGroup, scale: float, window: int | None
) -> Tensor:
    kv_heads, dim = keys.shape[2:]
    share = q.shape[1] // kv_heads
    k, v, mask = _gather_pages(keys, group), _gather_pages(values, group), group.masks[window]
    q = q.view(group.num_sequences, group.num_rows, kv_heads, share, dim)
    if group.is_folded:
        q = q.transpose(1, 2).reshape(group.num_sequences, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.view(group.num_sequences, kv_heads, group.num_rows, share, dim).transpose(1, 2)
    else:
        heads = [q[:, :, :, i].transpose(1, 2) for i in range(share)]
        outs = [F.scaled_dot_product_attention(head, k, v, attn_mask=mask, scale=scale) for head in heads]
        out = torch.stack(outs, 3).transpose(1, 2)
    return out.reshape(group.num_sequences * group.num_rows, -1)


def _gather_pages(cache: Tensor, group: SpanGroup) -> Tensor:
    """The group's pages, laid end to end: [sequences, kv_heads, length, dim]."""
    _, _, kv_heads, dim = cache.shape
    if isinstance(group.pages, slice):
        pages = cache[group.pages]
    else:
        pages = cache.view(cache.shape[0], -1).index_select(0, group.pages)
    return pages.view(group.num_sequences, -1, kv_heads, dim)[:, : group.length].transpose(1, 2)
