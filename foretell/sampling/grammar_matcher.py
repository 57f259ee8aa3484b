"""The state of one sequence in its grammar."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import ForetellError
from foretell.types import Draft

if TYPE_CHECKING:
    from llguidance import LLMatcher

Rows = NDArray[np.int32]  # [rows, words]: one bit per token, and at `vocab` the bit that the sequence may end


class GrammarError(ForetellError):
    """A grammar that cannot continue: it is too complex here, or a token was not allowed."""


class GrammarMatcher:
    """Follows one sequence through its grammar and computes token masks for drafts. Not thread-safe.

    The end tokens are those of the request: each is allowed exactly where the grammar may end, and ends the sequence.
    Without end tokens the sequence ends where the grammar does.
    """

    def __init__(self, inner: LLMatcher, vocab: int, ends: Iterable[int]) -> None:
        self._inner = inner
        self._vocab = vocab
        self._ends = tuple(sorted(end for end in set(ends) if end < vocab))
        self.finished = False
        self.num_tokens = 0  # tokens consumed

    def advance(self, tokens: Tokens[int]) -> int:
        """Consume output tokens; return how many were consumed: tokens after the end are not."""
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            if token in self._ends:
                self._require(self._inner.is_accepting(), f"the output may not end here with token {token}")
                self.finished = True
            else:
                self._require(self._inner.consume_token(token), f"token {token} is not allowed here")
                self.finished = self._is_over()
            self.num_tokens += 1
        return len(tokens)

    def masks(self, draft: Draft = Draft()) -> Tensor:
        """Return the masks [len(draft) + 1, vocab], True where allowed, after the root and after each node.

        The row of a node that is not allowed, has such an ancestor or ends the sequence is all True.
        """
        rows = self._rows(draft)
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        if self._ends:
            bits[:, self._ends] = bits[:, self._vocab, None]
        self._require(bool(bits[0, : self._vocab].any()), "the stop tokens leave no token that may follow")
        return torch.from_numpy(bits[:, : self._vocab])

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that the grammar forces next (jump-forward)."""
        if self.finished:
            return []
        run = self._cut(self._inner.compute_ff_tokens())[:limit]
        self._require(self._inner.consume_tokens(run), "the forced tokens are not allowed")
        over = self._inner.is_stopped() and len(self._ends) == 1
        self._back(len(run))
        return run + list(self._ends[: limit - len(run)]) if over else run

    def count_allowed(self, tokens: Tokens[int]) -> int:
        """Return how many of the first `tokens` the grammar allows: the part of a draft chain that can be accepted."""
        taken = ended = 0
        for token in () if self.finished else tokens:
            if token in self._ends:
                ended = int(self._inner.is_accepting())
                break
            if not self._may_follow(token):
                break
            self._require(self._inner.consume_token(token), f"token {token} was allowed and is not")
            taken += 1
            if self._is_over():
                break
        self._back(taken)
        return taken + ended

    def _rows(self, draft: Draft) -> Rows:
        """Return the masks as bits; rows that are not needed have all bits set."""
        assert not self.finished, "a finished sequence has no next token"
        rows = np.full((len(draft) + 1, (self._vocab + 32) // 32), -1, np.int32)
        self._fill(rows, 0)
        below = _children(draft)
        depths = draft.depths()
        depth, waiting = 0, below[-1]
        while waiting:
            node = waiting.pop()
            self._back(depth - (depths[node] - 1))
            depth = depths[node] - 1
            token = draft.tokens[node]
            if token in self._ends or not _has(rows[draft.parents[node] + 1], token):
                continue
            self._require(self._inner.consume_token(token), f"token {token} was allowed and is not")
            depth += 1
            if not self._is_over():
                self._fill(rows, node + 1)
                waiting += below[node]
        self._back(depth)
        return rows

    def _fill(self, rows: Rows, row: int) -> None:
        width = rows.strides[0]
        self._inner.unsafe_compute_mask_ptr(rows.ctypes.data + row * width, width)
        self._require(not self._inner.is_error(), "no mask")  # llguidance would only report that the sequence may end

    def _may_follow(self, token: int) -> bool:
        """Return what the mask says of one token, without computing it: forced text has one tokenization only."""
        forced = self._inner.compute_ff_tokens()
        return token == forced[0] if forced else self._inner.validate_tokens([token]) == 1

    def _cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first end token."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))]

    def _is_over(self) -> bool:
        """Return whether the grammar has ended and there is no end token."""
        return not self._ends and self._inner.is_stopped()

    def _back(self, count: int) -> None:
        if count:
            self._require(self._inner.rollback(count), "tokens cannot be taken back")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise GrammarError(f"the grammar cannot continue: {one_line(self._inner.get_error()) or otherwise}")


def one_line(reason: str, longest: int = 300) -> str:
    """Return the error message of llguidance in one line, without its state dump."""
    text = " ".join(reason.split("<state>")[0].split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _children(draft: Draft) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for node, parent in enumerate(draft.parents):
        below[parent].append(node)
    return below


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)
