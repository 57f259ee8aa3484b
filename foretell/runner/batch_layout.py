"""Packs scheduled sequences and their drafts into the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.kernels.attention import Span
from foretell.kernels.bounds import require
from foretell.kv.cache import slots_of
from foretell.types import Draft, ScheduledSequence

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchLayout:
    """The rows of a step, one per token, on the host; an executor copies them to the model's device."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]  # one per sequence, in the order of the rows
    logits_indices: list[int]  # rows whose logits are computed, ascending

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    @cached_property
    def table(self) -> IntArray:
        """Return tokens, positions and slots as one array [3, rows]; small steps are faster with the lists."""
        return np.array([self.tokens, self.positions, self.slots], np.int64)


def pack(scheduled: list[ScheduledSequence], drafts: list[Draft], page_size: int) -> BatchLayout:
    """Lay out the new tokens of each sequence, followed by the nodes of its draft."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_indices: list[int] = []
    spans: list[Span] = []
    for each, draft in zip(scheduled, drafts, strict=True):
        seq, start, count, nodes = each.seq, each.start, each.num_new_tokens, len(draft.parents)
        first, end, stop = len(tokens), start + count, start + count + nodes
        pages = tuple(seq.pages[: -(-stop // page_size)])
        require(stop <= len(pages) * page_size, "pages for all tokens and draft tokens of a sequence")
        if count == 1:
            tokens.append(seq.tokens[start])
        else:
            tokens += seq.tokens[start:end]
        if nodes:
            tokens += draft.tokens
        parents = draft.parents if nodes and not draft.is_chain else ()
        if parents:
            positions += range(start, end)
            positions += [end - 1 + depth for depth in draft.depths()]
        else:  # a chain continues the sequence
            positions += range(start, stop)
        slots += slots_of(pages, page_size, start, stop)
        logits_indices += range(first + count + nodes - num_logits(each, draft), first + count + nodes)
        spans.append(Span(first, count + nodes, start, pages, parents))
    return BatchLayout(tokens, positions, slots, spans, logits_indices)


def pack_async(scheduled: list[ScheduledSequence], rows: list[int], page_size: int) -> BatchLayout:
    """Lay out one row per sequence whose token is still unknown: the next token of this row of the step in flight."""
    starts = [each.start for each in scheduled]
    pages = [tuple(each.seq.pages[: each.start // page_size + 1]) for each in scheduled]
    slots = [each[-1] * page_size + start % page_size for each, start in zip(pages, starts, strict=True)]
    spans = [Span(i, 1, start, each) for i, (start, each) in enumerate(zip(starts, pages, strict=True))]
    return BatchLayout([-1 - row for row in rows], starts, slots, spans, list(range(len(scheduled))))


def num_logits(scheduled: ScheduledSequence, draft: Draft) -> int:
    """Return for how many of a sequence's rows, the last ones, logits are computed."""
    if scheduled.wants_prompt_logprobs:
        return scheduled.num_new_tokens + len(draft.parents)
    return 1 + len(draft.parents) if scheduled.start + scheduled.num_new_tokens == scheduled.length else 0


def flatten_spans(spans: list[Span]) -> tuple[list[int], list[int], list[int]]:
    """Return the fields of `foretell::Span` for each span, and the pages and parents of all spans."""
    fields: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    for span in spans:
        fields += (span.first, span.rows, span.start, len(pages), len(span.parents), len(parents))
        pages += span.pages
        parents += span.parents
    return fields, pages, parents
