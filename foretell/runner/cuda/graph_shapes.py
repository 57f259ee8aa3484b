"""Shapes that steps are padded to before they run as CUDA graphs, and how a step is split into passes.

Nothing here needs Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from foretell.kernels.attention import Span
from foretell.kernels.triton.row_tables import NO_SPLIT, SHORT, StepShape, num_splits
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.tables import Tiles, make_tiles

CATCH_UP = 8  # tokens without logits that a decoding sequence may have; more make its span a prefill
CAPTURE_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # rows that steps are padded to; larger steps run eagerly
CAPTURE_CONTEXTS = (512, 1024, 2048, 4096)  # tokens that contexts are padded to; longer ones to powers of 2
# Levels that tree tables are padded to. Padding costs nothing, but each value compiles a kernel.
CAPTURE_DEPTHS = (32, 256)
SMALL_TILE = 16  # height of an attention tile in query rows times heads, for few rows per sequence
LARGE_TILE = 32  # for many rows per sequence
PREFILL_TILE = 64  # for prefill
MANY_ROWS = 48  # rows of a sequence from which small tiles fill the device without splitting the keys
MIN_ROWS_PER_TILE = 4  # on average, in a step of several sequences
MAX_CHAIN_PREFILL = CATCH_UP + 1  # pending tokens that the first step of a chain can run; more are prefilled before
MAX_STEP_PADDING = 2  # a chain is padded to at most this many times its steps: each one runs the whole model


@dataclass(frozen=True)
class ChainShape:
    """Padded shape of a chain of draft tokens; chains of one shape share a CUDA graph."""

    first: StepShape  # of the first step, which runs all pending tokens
    height: int  # of a tile with one row
    splits: int  # of the keys, for the longest sequence at its end
    sequences: int  # padded
    steps: int
    vocab: int  # tokens that may be drafted
    sampled: bool = False  # some sequence samples: the kernel takes longer than the argmax

    @property
    def decode(self) -> StepShape:
        """Return the shape of the later steps, which run one row per sequence."""
        return StepShape(self.sequences, self.sequences, self.height, self.splits)

    def covers(self, other: ChainShape) -> bool:
        """Return whether a chain of the other shape can be padded to this one: it equals the start of a longer one."""
        fits = self.first.covers(other.first) and self.decode.covers(other.decode)
        same_kind = (self.vocab, self.sampled) == (other.vocab, other.sampled)
        return fits and same_kind and other.steps <= self.steps <= MAX_STEP_PADDING * other.steps

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Return a key that orders shapes by the time they take."""
        return self.steps, *self.first.padded_size, self.sequences, self.splits


def is_plain_decode(packed: BatchLayout) -> bool:
    """Return whether each sequence runs one row and wants its logits."""
    return len(packed.spans) == packed.rows == len(packed.logits_indices)


def prefill_spans(packed: BatchLayout) -> list[bool]:
    """Return for each span whether it is a prefill; a draft model that catches up on a few tokens is none."""
    if packed.rows - len(packed.logits_indices) <= CATCH_UP:
        return [False] * len(packed.spans)
    bounds = [bisect_left(packed.logits_indices, span.first) for span in packed.spans] + [len(packed.logits_indices)]
    return [
        span.rows - (stop - start) > CATCH_UP
        for span, start, stop in zip(packed.spans, bounds, bounds[1:], strict=False)
    ]


def split_step(packed: BatchLayout, max_rows: int) -> list[BatchLayout]:
    """Split a step into passes of either prefill or decode spans, in order.

    A decode pass has at most `max_rows` rows, or a single span. So the bits of a decoding sequence depend neither on
    prefills in the same step nor on the batch size.
    """
    if is_plain_decode(packed) and packed.rows <= max_rows:
        return [packed]
    is_prefill = prefill_spans(packed)
    if not any(is_prefill) and packed.rows <= max_rows or all(is_prefill):
        return [packed]
    starts = [0]
    for at in range(1, len(is_prefill)):
        rows = packed.spans[at].first + packed.spans[at].rows - packed.spans[starts[-1]].first
        if is_prefill[at] != is_prefill[at - 1] or (not is_prefill[at] and rows > max_rows):
            starts.append(at)
    return [_slice(packed, start, stop) for start, stop in zip(starts, [*starts[1:], len(is_prefill)], strict=True)]


def _slice(packed: BatchLayout, start: int, stop: int) -> BatchLayout:
    """Return spans `start` to `stop` as a step of their own."""
    first, last = packed.spans[start].first, packed.spans[stop - 1]
    end = last.first + last.rows
    indices = packed.logits_indices[bisect_left(packed.logits_indices, first) : bisect_left(packed.logits_indices, end)]
    spans = [replace(span, first=span.first - first) for span in packed.spans[start:stop]]
    rows = slice(first, end)
    columns = packed.tokens[rows], packed.positions[rows], packed.slots[rows]
    return BatchLayout(*columns, spans, [row - first for row in indices])


def step_shape(packed: BatchLayout, queries_per_kv_head: int) -> tuple[StepShape, Tiles | None]:
    """Return the shape that a step is padded to, and its tiles; None in plain decoding, where each sequence is one."""
    rows = next((size for size in CAPTURE_ROWS if packed.rows <= size), packed.rows)
    small = max(SMALL_TILE, next_power_of_2(queries_per_kv_head))
    if is_plain_decode(packed):
        keys = padded_context(max([span.start for span in packed.spans]) + 1)
        return StepShape(rows, next_power_of_2(packed.rows), small, num_splits(keys)), None
    is_prefill = all(prefill_spans(packed))
    if is_prefill:  # with this many rows the library's matrix products add up alike for any number of them
        rows, height = max(rows, CAPTURE_ROWS[-1]), max(PREFILL_TILE, next_power_of_2(queries_per_kv_head))
    else:
        height = _tile_rows(packed.spans, small, queries_per_kv_head)
    tiles = make_tiles(packed, height // queries_per_kv_head, is_prefill)
    depth = padded_depth(tiles.depth)
    splits = NO_SPLIT if is_prefill else num_splits(padded_context(max(span.stop for span in packed.spans)))
    nodes = min(rows, next_power_of_2(len(tiles.nodes))) if depth else 0
    # Several sequences can divide the rows in any way, so the number of tiles follows from the rows.
    min_tiles = next_power_of_2(rows) // MIN_ROWS_PER_TILE if len(packed.spans) > 1 else 1
    return StepShape(rows, max(min_tiles, next_power_of_2(len(tiles.shared))), height, splits, depth, nodes), tiles


def chain_shape(
    packed: BatchLayout, first: StepShape, queries_per_kv_head: int, steps: int, vocab: int, sampled: bool = False
) -> ChainShape:
    """Return the shape of a chain whose first step has the shape `first`.

    The first step is padded to two rows per sequence: after a fully accepted draft its last token is still pending. It
    also has room for sequences that catch up on tokens drafted by others. So one graph serves all of these, and a few
    more rows in one step cost next to nothing.
    """
    sequences, height = len(packed.spans), max(LARGE_TILE, next_power_of_2(queries_per_kv_head))
    if first.splits != NO_SPLIT:
        min_rows = max(2 * sequences, MAX_CHAIN_PREFILL)
        rows = max(first.rows, next((size for size in CAPTURE_ROWS if min_rows <= size), 0))
        # Several sequences can divide the rows in any way.
        tiles = rows if sequences > 1 else -(-MAX_CHAIN_PREFILL // (height // queries_per_kv_head))
        first = StepShape(rows, max(first.tiles, next_power_of_2(tiles)), max(first.tile_height, height), first.splits)
    return ChainShape(
        first=first,
        height=max(SMALL_TILE, next_power_of_2(queries_per_kv_head)),
        splits=num_splits(padded_context(max(span.stop for span in packed.spans) + steps)),
        sequences=min(first.rows, next_power_of_2(sequences)),  # the first step has a row for each
        steps=steps,
        vocab=vocab,
        sampled=sampled,
    )


def _tile_rows(spans: list[Span], small: int, queries_per_kv_head: int) -> int:
    """Return the tile height for these spans, as measured on an H200.

    Large tiles are faster for many rows per sequence, unless the rows suffice for small tiles with unsplit keys; the
    keys of trees are always split.
    """
    rows, keys = max(span.rows for span in spans), max(span.stop for span in spans)
    unsplit = rows >= MANY_ROWS and keys <= SHORT and not any(span.parents for span in spans)
    return small if unsplit or rows <= small // queries_per_kv_head else max(LARGE_TILE, small)


def padded_depth(depth: int) -> int:
    """Return the number of levels that trees of this depth are padded to."""
    return next((size for size in (0, *CAPTURE_DEPTHS) if depth <= size), next_power_of_2(depth))


def padded_context(tokens: int) -> int:
    """Return the number of tokens that a context is padded to."""
    return next((size for size in CAPTURE_CONTEXTS if tokens <= size), next_power_of_2(tokens))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below `number`."""
    return 1 << (number - 1).bit_length()
