"""Where one text stands in its grammar."""

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

Rows = NDArray[np.int32]  # [rows, words]: a bit for each token, and at `vocab` one that says the text may stop


class GrammarError(ForetellError):
    """A grammar that cannot go on: too complex at this place, or left by a token it does not allow."""


class GrammarMatcher:
    """Follows one text through its grammar, and looks ahead along drafts. For one thread at a time.

    The end tokens are the request's own: each is allowed exactly where the text may stop, and ends it. Without any,
    the text ends where the grammar has nothing more to say.
    """

    def __init__(self, inner: LLMatcher, vocab: int, ends: Iterable[int]) -> None:
        self._inner = inner
        self._vocab = vocab
        self._ends = tuple(sorted(end for end in set(ends) if end < vocab))
        self.finished = False
        self.num_tokens = 0  # tokens of the text

    def advance(self, tokens: Tokens[int]) -> int:
        """Follow tokens that entered the text. Tells how many were followed: what lies behind its end is not."""
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            if token in self._ends:
                self._require(self._inner.is_accepting(), f"the text may not end here with token {token}")
                self.finished = True
            else:
                self._require(self._inner.consume_token(token), f"token {token} is not allowed here")
                self.finished = self._is_over()
            self.num_tokens += 1
        return len(tokens)

    def masks(self, draft: Draft = Draft()) -> Tensor:
        """[len(draft) + 1, vocab], True where allowed: after the root, then after each node.

        A node that is forbidden, hangs below such a one, or ends the text has no next token: its row is all True.
        """
        rows = self._rows(draft)
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        if self._ends:
            bits[:, self._ends] = bits[:, self._vocab, None]
        self._require(bool(bits[0, : self._vocab].any()), "the stop tokens leave no token that may follow")
        return torch.from_numpy(bits[:, : self._vocab])

    def forced_tokens(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next, whatever the model says."""
        if self.finished:
            return []
        run = self._cut(self._inner.compute_ff_tokens())[:limit]
        self._require(self._inner.consume_tokens(run), "the forced tokens are not allowed")
        over = self._inner.is_stopped() and len(self._ends) == 1
        self._back(len(run))
        return run + list(self._ends[: limit - len(run)]) if over else run

    def count_allowed(self, tokens: Tokens[int]) -> int:
        """How many of `tokens`, from the first on, the grammar lets follow: those a chain draft need not lose."""
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
        """The masks as bits. Rows that nobody asks for stay full."""
        assert not self.finished, "a finished text has no next token"
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
        self._require(not self._inner.is_error(), "no mask")  # llguidance would only say that the text may stop

    def _may_follow(self, token: int) -> bool:
        """As the mask would say, without making one: forced text has one spelling only."""
        forced = self._inner.compute_ff_tokens()
        return token == forced[0] if forced else self._inner.validate_tokens([token]) == 1

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to the first token that would end the text."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))]

    def _is_over(self) -> bool:
        """Whether the grammar has come to its end and there is no end token to say so."""
        return not self._ends and self._inner.is_stopped()

    def _back(self, count: int) -> None:
        if count:
            self._require(self._inner.rollback(count), "tokens cannot be taken back")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise GrammarError(f"the grammar cannot go on: {one_line(self._inner.get_error()) or otherwise}")


def one_line(reason: str, longest: int = 300) -> str:
    """llguidance's reason without the pictures it draws."""
    text = " ".join(reason.split("<state>")[0].split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _children(draft: Draft) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for node, parent in enumerate(draft.parents):
        below[parent].append(node)
    return below


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)
