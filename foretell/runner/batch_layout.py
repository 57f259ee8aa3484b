"""Sequences and their drafts, laid out as the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.kernels.attention import Span
from foretell.kernels.bounds import require
from foretell.kv.cache import slots_of
from foretell.types import Draft, ScheduledSequence

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchLayout:
    """A step's rows on the host; an executor takes them to where the model is."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]  # one a share, in the order of the rows
    logits_indices: list[int]  # rows whose logits are wanted, rising

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def table(self) -> Whole:
        """[3, n]: tokens, positions, slots. Who looks at a few rows one by one has no use for it."""
        return np.array([self.tokens, self.positions, self.slots], np.int64)


def pack(shares: list[ScheduledSequence], drafts: list[Draft], page_size: int) -> BatchLayout:
    """Each share's pending tokens, then its draft's nodes."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for share, draft in zip(shares, drafts, strict=True):
        seq, start, take, nodes = share.seq, share.start, share.num_new_tokens, len(draft.parents)
        first, end, stop = len(tokens), start + take, start + take + nodes
        pages = tuple(seq.pages[: -(-stop // page_size)])
        require(stop <= len(pages) * page_size, "pages for all tokens and draft tokens of a sequence")
        if take == 1:
            tokens.append(seq.tokens[start])
        else:
            tokens += seq.tokens[start:end]
        if nodes:
            tokens += draft.tokens
        parents = draft.parents if nodes and not draft.is_chain else ()
        if parents:
            positions += range(start, end)
            positions += [end - 1 + depth for depth in draft.depths()]
        else:  # a chain goes on as the text does
            positions += range(start, stop)
        slots += slots_of(pages, page_size, start, stop)
        wanted += range(first + take + nodes - logit_rows(share, draft), first + take + nodes)
        spans.append(Span(first, take + nodes, start, pages, parents))
    return BatchLayout(tokens, positions, slots, spans, wanted)


def pack_async(shares: list[ScheduledSequence], rows: list[int], page_size: int) -> BatchLayout:
    """One row for each share: the token that this row of the step before comes to, which nobody knows yet."""
    starts = [share.start for share in shares]
    pages = [tuple(share.seq.pages[: share.start // page_size + 1]) for share in shares]
    slots = [each[-1] * page_size + start % page_size for each, start in zip(pages, starts, strict=True)]
    spans = [Span(i, 1, start, each) for i, (start, each) in enumerate(zip(starts, pages, strict=True))]
    return BatchLayout([-1 - row for row in rows], starts, slots, spans, list(range(len(shares))))


def logit_rows(share: ScheduledSequence, draft: Draft) -> int:
    """How many of a share's rows, the last ones, have their logits wanted."""
    if share.wants_prompt_logprobs:
        return share.num_new_tokens + len(draft.parents)
    return 1 + len(draft.parents) if share.start + share.num_new_tokens == share.length else 0


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
