"""Prompt lookup: copies what followed the last time the sequence ended with the same n-gram."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Values

from foretell.draft.base import Drafter
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, chain_parents

SEPARATOR = 2**31 - 1  # after each stored output; greater than any token
MAX_MATCH = 32  # tokens compared at most
MAX_POSITIONS = 32  # earlier positions considered, the latest first
LONG_NGRAM = 6  # tokens; its latest position is found directly, however often its last two tokens occurred since

Match = tuple[int, int]  # matching tokens, and the position after them


class NGramIndex:
    """An index of the positions that follow each token and each pair of tokens; adding a token takes constant time."""

    def __init__(self, tokens: list[int] | None = None) -> None:
        """`tokens` may grow at the end; call `catch_up` afterwards."""
        self.tokens = [] if tokens is None else tokens
        self._latest: dict[int, int] = {}  # latest position after a token, a pair or a long n-gram
        # By position, the previous position after the same token, and after the same pair; 0 is none.
        self._previous = [[0], [0, 0]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def memory(self) -> int:
        """Bytes, by the sizes of CPython objects: 36 for each key and 32 for each position."""
        own = sum(map(sys.getsizeof, (self.tokens, self._latest, *self._previous)))
        return own + len(self._latest) * 36 + len(self.tokens) * 32

    def catch_up(self) -> None:
        """Index the tokens that are new; nothing follows the last one yet."""
        tokens, latest, (after_token, after_pair) = self.tokens, self._latest, self._previous
        for position in range(len(after_token), len(tokens)):
            token = tokens[position - 1]
            after_token.append(latest.get(token, 0))
            latest[token] = position
            if position > 1:
                pair = (tokens[position - 2] + 1 << 32) + token
                after_pair.append(latest.get(pair, 0))
                latest[pair] = position
            if position >= LONG_NGRAM:
                latest[_key(tokens, position)] = position

    def matches(self, tail: list[int], end: int) -> list[Match]:
        """Return positions where at least two tokens match the end of tail[:end], the latest first, without
        duplicates."""
        position = self._latest.get((tail[end - 2] + 1 << 32) + tail[end - 1], 0) if end > 1 else 0
        if position == end and tail is self.tokens:  # this is the end itself
            position = self._previous[1][position]
        if not position:
            return []
        direct = self._latest.get(_key(tail, end), 0) if end >= LONG_NGRAM else 0
        tokens, previous, found = self.tokens, self._previous[1], []
        for _ in range(MAX_POSITIONS):
            length, limit = 2, min(MAX_MATCH, position, end)
            while length < limit and tokens[position - 1 - length] == tail[end - 1 - length]:
                length += 1
            found.append((length, position))
            direct = 0 if direct in (position, end) else direct
            position = previous[position]
            if not position or length == MAX_MATCH:
                break
        return found + self._verified(direct, tail, end) if direct else found

    def latest(self, token: int) -> int:
        """Return the latest position after a token; 0 is none."""
        return self._latest.get(token, 0)

    def after(self, token: int) -> list[int]:
        """Return positions after a token, the latest first."""
        position, previous = self._latest.get(token, 0), self._previous[0]
        found: list[int] = []
        while position and len(found) < MAX_POSITIONS:
            found.append(position)
            position = previous[position]
        return found

    def _verified(self, position: int, tail: list[int], end: int) -> list[Match]:
        """Return the match at the position of a hash key, unless the key belongs to another n-gram."""
        length, limit = 0, min(MAX_MATCH, position, end)
        while length < limit and self.tokens[position - 1 - length] == tail[end - 1 - length]:
            length += 1
        return [(length, position)] if length >= LONG_NGRAM else []


def _key(tokens: list[int], end: int) -> int:
    """Return the key of a long n-gram: negative, unlike the keys of tokens and pairs."""
    return -abs(hash(tuple(tokens[end - LONG_NGRAM : end]))) - 1


def copy_tokens(tokens: Values[int], position: int, count: int) -> list[int]:
    """Return `count` tokens from a position on, or fewer at the end of a stored output.

    At the end of the sequence itself the copy repeats, as a loop would.
    """
    found = list(tokens[position : position + count])
    if SEPARATOR in found:
        return found[: found.index(SEPARATOR)]
    period = len(tokens) - position
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def chain_draft(tokens: list[int], confidence: list[float], source: str) -> Draft:
    """Return a chain with the confidence of each token."""
    return Draft(tuple(tokens), chain_parents(len(tokens)), source, None, tuple(confidence))


class SequenceIndices(dict[int, NGramIndex]):
    """The indices of running sequences by id."""

    def current(self, seq: Sequence) -> NGramIndex:
        """Return the index of a sequence, up to date."""
        index = self.get(seq.id)
        if index is None:
            index = self[seq.id] = NGramIndex(seq.tokens)
        index.catch_up()
        return index


class NGramDrafter(Drafter):
    """Prompt lookup decoding: the longest match wins, and of equal ones the latest."""

    name = "ngram"
    traits = DrafterTraits(is_free=True)

    def __init__(self, min_match: int = 2, max_match: int = 4) -> None:
        """Matches of `min_match` to `max_match` tokens count; longer ones are no better."""
        self.min_match, self.max_match = min_match, max_match
        self._indices = SequenceIndices()

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._draft(seq, budget.depth) if budget.nodes else NO_DRAFT
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._indices.current(seq)

    def _draft(self, seq: Sequence, nodes: int) -> Draft:
        length, position = self._best_match(self._indices.current(seq))
        if length < self.min_match:
            return NO_DRAFT
        confidence = 1 - 1 / (1 + length)
        return chain_draft(copy_tokens(seq.tokens, position, nodes), [confidence] * nodes, self.name)

    def _best_match(self, index: NGramIndex) -> Match:
        best, best_position = 0, 0
        if self.max_match > 1:
            for length, position in index.matches(index.tokens, len(index)):
                if length >= self.max_match:
                    return length, position
                if length > best:
                    best, best_position = length, position
        if not best and (position := index.latest(index.tokens[-1])):
            return 1, position
        return best, best_position

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)
