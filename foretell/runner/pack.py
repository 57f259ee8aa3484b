"""Sequences and their drafts, laid out as one batch."""

from __future__ import annotations

import torch

from foretell.kernels.attention import Layout, Span, group_spans
from foretell.kv.cache import slots_of
from foretell.models.batch import Batch
from foretell.types import Draft, Share


def pack(shares: list[Share], drafts: list[Draft], layout: Layout, device: torch.device) -> Batch:
    """The batch of a step: each share's pending tokens, then its draft's nodes."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for share, draft in zip(shares, drafts, strict=True):
        span = span_of(share, draft, len(tokens), layout.page_size)
        end = share.start + share.take
        tokens += share.seq.tokens[share.start : end]
        tokens += draft.tokens
        positions += range(share.start, end)
        positions += [end - 1 + depth for depth in draft.depths()]
        slots += slots_of(span.pages, layout.page_size, span.start, span.stop)
        wanted += range(span.first + span.rows - logit_rows(share, draft), span.first + span.rows)
        spans.append(span)
    table = torch.tensor([tokens, positions, slots], device=device)
    rows = None if len(wanted) == len(tokens) else torch.tensor(wanted, dtype=torch.long, device=device)
    return Batch(table[0], table[1], table[2], group_spans(spans, layout), rows)


def logit_rows(share: Share, draft: Draft) -> int:
    """How many of a share's rows, the last ones, have their logits wanted."""
    if share.reads_prompt_logprobs:
        return share.take + len(draft)
    return 1 + len(draft) if share.reaches_end else 0


def span_of(share: Share, draft: Draft, first: int, page_size: int) -> Span:
    """Where the share's rows stand in the batch and in the cache."""
    rows = share.take + len(draft)
    pages = -(-(share.start + rows) // page_size)
    assert pages <= len(share.seq.pages), "pages were reserved for the whole share"
    return Span(first, rows, share.start, tuple(share.seq.pages[:pages]), () if draft.is_chain else draft.parents)
