"""A step cut into passes: texts that are written apart from prompts that are read, and not too many at once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from foretell.runner.batch_layout import BatchLayout

CATCH_UP = 8  # tokens read beside those whose logits are wanted that do not make a prompt yet


def single(packed: BatchLayout) -> bool:
    """Whether each sequence has one row, whose logits are wanted: what plain decoding is."""
    return len(packed.spans) == packed.rows == len(packed.wanted)


def readers(packed: BatchLayout) -> list[bool]:
    """For each span whether it is a stretch of a prompt; a few tokens are what a draft model has to catch up with."""
    if packed.rows - len(packed.wanted) <= CATCH_UP:
        return [False] * len(packed.spans)
    wanted = [bisect_left(packed.wanted, span.first) for span in packed.spans] + [len(packed.wanted)]
    return [
        span.rows - (behind - before) > CATCH_UP
        for span, before, behind in zip(packed.spans, wanted, wanted[1:], strict=False)
    ]


def passes(packed: BatchLayout, most: int) -> list[BatchLayout]:
    """The step's spans in order, each pass of one kind; one that writes has at most `most` rows, or a single span."""
    if single(packed) and packed.rows <= most:
        return [packed]
    reads = readers(packed)
    if not any(reads) and packed.rows <= most or all(reads):
        return [packed]
    starts = [0]
    for at in range(1, len(reads)):
        rows = packed.spans[at].first + packed.spans[at].rows - packed.spans[starts[-1]].first
        if reads[at] != reads[at - 1] or (not reads[at] and rows > most):
            starts.append(at)
    return [_some(packed, start, stop) for start, stop in zip(starts, [*starts[1:], len(reads)], strict=True)]


def _some(packed: BatchLayout, start: int, stop: int) -> BatchLayout:
    """Spans `start` to `stop` as a step of their own."""
    first, last = packed.spans[start].first, packed.spans[stop - 1]
    end = last.first + last.rows
    wanted = packed.wanted[bisect_left(packed.wanted, first) : bisect_left(packed.wanted, end)]
    spans = [replace(span, first=span.first - first) for span in packed.spans[start:stop]]
    own = slice(first, end)
    columns = packed.tokens[own], packed.positions[own], packed.slots[own]
    return BatchLayout(*columns, spans, [row - first for row in wanted])
