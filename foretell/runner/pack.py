"""Sequences and their drafts, laid out as the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.kernels.attention import Span
from foretell.kv.cache import slots_of
from foretell.types import Draft, Share

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """A step's rows on the host; an executor takes them to where the model is."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]  # one a share, in the order of the rows
    wanted: list[int]  # rows whose logits are wanted, rising

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def table(self) -> Whole:
        """[3, n]: tokens, positions, slots. Who looks at a few rows one by one has no use for it."""
        return np.array([self.tokens, self.positions, self.slots], np.int64)


def pack(shares: list[Share], drafts: list[Draft], page_size: int) -> Packed:
    """Each share's pending tokens, then its draft's nodes."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for share, draft in zip(shares, drafts, strict=True):
        span = span_of(share, draft, len(tokens), page_size)
        end = share.start + share.take
        tokens += share.seq.tokens[share.start : end]
        tokens += draft.tokens
        if span.parents:
            positions += range(share.start, end)
            positions += [end - 1 + depth for depth in draft.depths()]
        else:  # a chain goes on as the text does
            positions += range(share.start, span.stop)
        slots += slots_of(span.pages, page_size, span.start, span.stop)
        wanted += range(span.first + span.rows - logit_rows(share, draft), span.first + span.rows)
        spans.append(span)
    return Packed(tokens, positions, slots, spans, wanted)


def pack_ahead(shares: list[Share], rows: list[int], page_size: int) -> Packed:
    """One row for each share: the token that this row of the step before comes to, which nobody knows yet."""
    starts = [share.start for share in shares]
    pages = [tuple(share.seq.pages[: share.start // page_size + 1]) for share in shares]
    slots = [each[-1] * page_size + start % page_size for each, start in zip(pages, starts, strict=True)]
    spans = [Span(i, 1, start, each) for i, (start, each) in enumerate(zip(starts, pages, strict=True))]
    return Packed([-1 - row for row in rows], starts, slots, spans, list(range(len(shares))))


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


def span_lists(spans: list[Span]) -> tuple[list[int], list[int], list[int]]:
    """Of each span what `foretell::Span` has, and the pages and parents of all."""
    rows: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    for span in spans:
        rows += (span.first, span.rows, span.start, len(pages), len(span.parents), len(parents))
        pages += span.pages
        parents += span.parents
    return rows, pages, parents
