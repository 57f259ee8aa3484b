"""An index of many documents: its positions, sorted by the tokens before them, last token first.

This is a suffix array of the reversed text. Positions with the longest common context are next to each other, so one
binary search finds the longest match of a sequence's end. It takes 12 bytes per token, an `NGramIndex` about 150, and
three flat arrays can be mapped from a file.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.draft.ngram import MAX_MATCH, SEPARATOR, Match

INDEX_BYTES = 12  # per token: the token, its copy in the reversed text, and a position
MAX_CANDIDATES = 4  # positions considered, those with the longest match first
MAX_STALE = 64  # positions of stale files passed over on either side
MIN_MATCH = 2  # tokens
TOKEN_BYTES = 4
CONTEXT_BYTES = MAX_MATCH * TOKEN_BYTES

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ContextArrays:
    """The arrays of an index, which can be stored."""

    tokens: Int32  # all documents, each followed by a separator
    contexts: npt.NDArray[np.uint8]  # the tokens in reverse order as big-endian bytes, which compare as the tokens do
    order: Int32  # positions 1 to n, sorted by the tokens before them

    @classmethod
    def build(cls, documents: Sequence[Int32]) -> ContextArrays:
        """Sort the contexts of these documents."""
        separator = np.array([SEPARATOR], dtype=np.int32)
        tokens = np.concatenate([part for each in documents for part in (each, separator)] or [separator[:0]])
        contexts = tokens[::-1].astype(">u4").view(np.uint8)
        return cls(tokens, contexts, _sort_contexts(tokens))

    def check(self) -> None:
        """Raise ValueError if the arrays do not belong together: reading them must stay inside."""
        size, order = len(self.tokens), self.order
        if len(self.contexts) != size * TOKEN_BYTES or len(order) != size:
            raise ValueError("the arrays have different lengths")
        if size and not (order.min() >= 1 and order.max() <= size and self.tokens.min() >= 0):
            raise ValueError("a position or a token is out of range")


def _sort_contexts(tokens: Int32) -> Int32:
    """Return the positions 1 to n by their last MAX_MATCH tokens (prefix doubling).

    A rank by the last k tokens, paired with the rank k positions earlier, gives the rank by the last 2k tokens.
    """
    rank, length = tokens.astype(np.int64), 1
    order = np.zeros(0, dtype=np.int64)
    while length < MAX_MATCH and len(tokens):
        key = rank << 32
        key[length:] += rank[:-length] + 1  # 0 is before the first token
        order = np.argsort(key, kind="stable")
        in_order = key[order]
        rank[order] = np.concatenate(([0], np.cumsum(in_order[1:] != in_order[:-1])))
        length *= 2
    return (order + 1).astype(np.int32)


class ContextIndex:
    """Finds what followed the end of a sequence in a set of documents; the interface of `NGramIndex`, read-only."""

    def __init__(self, arrays: ContextArrays, starts: Sequence[int], stale: frozenset[int] = frozenset()) -> None:
        """`starts` is where each document begins; positions of the documents `stale`, by number, are passed over."""
        self.tokens = arrays.tokens.data  # a memoryview: reading one element of it is faster than of an array
        self._contexts, self._order = arrays.contexts.data, arrays.order.data
        self._starts, self._stale = starts, stale

    def __len__(self) -> int:
        return len(self.tokens)

    def matches(self, tail: list[int], end: int) -> list[Match]:
        """Return the positions with the longest match of the end of tail[:end], longest first."""
        last = tail[max(0, end - MAX_MATCH) : end]
        last.reverse()
        key = struct.pack(f">{len(last)}I", *last)
        order, context = self._order, self._context
        right = bisect_left(order, key, key=context)
        left = right - 1
        number = int.from_bytes(key.ljust(CONTEXT_BYTES, b"\0"))
        size, most = len(order), len(last)
        before = self._common(left, number, most) if left >= 0 else 0
        after = self._common(right, number, most) if right < size else 0
        found: list[Match] = []
        passed = 0
        while len(found) < MAX_CANDIDATES and max(before, after) >= MIN_MATCH and passed < MAX_STALE:
            if before > after:
                length, position = before, order[left]
                left -= 1
                before = self._common(left, number, most) if left >= 0 else 0
            else:
                length, position = after, order[right]
                right += 1
                after = self._common(right, number, most) if right < size else 0
            if self._stale and bisect_right(self._starts, position - 1) - 1 in self._stale:
                passed += 1
            else:
                found.append((length, position))
        return found

    def _context(self, position: int) -> bytes:
        """Return the tokens before a position, last one first."""
        begin = (len(self._order) - position) * TOKEN_BYTES
        return self._contexts[begin : begin + CONTEXT_BYTES].tobytes()

    def _common(self, index: int, number: int, most: int) -> int:
        """Return how many tokens a context shares with the one that `number` encodes, `most` at most."""
        differing = number ^ int.from_bytes(self._context(self._order[index]).ljust(CONTEXT_BYTES, b"\xff"))
        return min(most, (CONTEXT_BYTES * 8 - differing.bit_length()) // (TOKEN_BYTES * 8))
