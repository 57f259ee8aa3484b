"""Copies what followed the last time the text ended like this."""

from __future__ import annotations

import sys

from foretell.draft.base import Drafter
from foretell.types import Budget, Draft, DrafterTraits, Sequence

END = 2**31 - 1  # stands behind each text of a store; no token is as great
WINDOW = 32  # the longest match looked for
SEEN = 32  # earlier places that are looked at, the latest first
LONG = 6  # tokens of a run that leads to its latest place at once, however often its last two occurred since

Match = tuple[int, int]  # tokens that agree, and the place that follows them


class NGramIndex:
    """For each token, and each pair of them, the places that followed. Reading a token costs a few entries, no more."""

    def __init__(self, tokens: list[int] | None = None) -> None:
        """`tokens` may grow at their end; whoever lets them grow calls `catch_up`."""
        self.tokens = [] if tokens is None else tokens
        self._latest: dict[int, int] = {}  # the place behind a token, a pair, a long run
        self._before = [[0], [0, 0]]  # by place the one before it that the same token, or pair, led to; 0 is none

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def memory(self) -> int:
        """Bytes, from the sizes of CPython's objects; a key takes 36 of its own, and a place 32 for all."""
        own = sum(map(sys.getsizeof, (self.tokens, self._latest, *self._before)))
        return own + len(self._latest) * 36 + len(self.tokens) * 32

    def catch_up(self) -> None:
        """Learn what followed what up to the text's end; nothing follows that yet."""
        tokens, latest, (behind_one, behind_two) = self.tokens, self._latest, self._before
        for place in range(len(behind_one), len(tokens)):
            token = tokens[place - 1]
            behind_one.append(latest.get(token, 0))
            latest[token] = place
            if place > 1:
                pair = (tokens[place - 2] + 1 << 32) + token
                behind_two.append(latest.get(pair, 0))
                latest[pair] = place
            if place >= LONG:
                latest[_key(tokens, place)] = place

    def matches(self, tail: list[int], end: int) -> list[Match]:
        """Where at least two tokens were met before that end tail[:end]; the latest places first, and none twice."""
        place = self._latest.get((tail[end - 2] + 1 << 32) + tail[end - 1], 0) if end > 1 else 0
        if place == end and tail is self.tokens:  # no earlier place, but the one that is asked about
            place = self._before[1][place]
        if not place:
            return []
        direct = self._latest.get(_key(tail, end), 0) if end >= LONG else 0
        tokens, before, found = self.tokens, self._before[1], []
        for _ in range(SEEN):
            length, limit = 2, min(WINDOW, place, end)
            while length < limit and tokens[place - 1 - length] == tail[end - 1 - length]:
                length += 1
            found.append((length, place))
            direct = 0 if direct in (place, end) else direct
            place = before[place]
            if not place or length == WINDOW:
                break
        return found + self._agree(direct, tail, end) if direct else found

    def latest(self, token: int) -> int:
        """The last place that followed a token; 0 is none."""
        return self._latest.get(token, 0)

    def after(self, token: int) -> list[int]:
        """Places that followed a token, the latest first."""
        place, before = self._latest.get(token, 0), self._before[0]
        found: list[int] = []
        while place and len(found) < SEEN:
            found.append(place)
            place = before[place]
        return found

    def _agree(self, place: int, tail: list[int], end: int) -> list[Match]:
        """A place that a key led to, if it is no other run's."""
        length, limit = 0, min(WINDOW, place, end)
        while length < limit and self.tokens[place - 1 - length] == tail[end - 1 - length]:
            length += 1
        return [(length, place)] if length >= LONG else []


def _key(tokens: list[int], end: int) -> int:
    """Of a long run; below zero, where no token's and no pair's is."""
    return -abs(hash(tuple(tokens[end - LONG : end]))) - 1


def copied(tokens: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from a place on, or as many as its text has; where nothing follows yet, it goes on with itself, as
    a repetition would."""
    found = tokens[place : place + count]
    if END in found:
        return found[: found.index(END)]
    period = len(tokens) - place
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def chain(tokens: list[int], sure: list[float], source: str) -> Draft:
    """A draft without branches, and how sure each guess is."""
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), source, None, tuple(sure))


NOTHING = Draft()


class NGramDrafter(Drafter):
    """Prompt lookup: the longest match wins, the most recent one among equals."""

    name = "ngram"
    traits = DrafterTraits(is_free=True)

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self.shortest, self.longest = shortest, longest
        self._kept: dict[int, NGramIndex] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._guess(seq, budget.depth) if budget.nodes else NOTHING
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._caught_up(seq)

    def _caught_up(self, seq: Sequence) -> NGramIndex:
        known = self._kept.get(seq.id)
        if known is None:
            known = self._kept[seq.id] = NGramIndex(seq.tokens)
        known.catch_up()
        return known

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        known = self._caught_up(seq)
        length, place = self._match(known)
        if length < self.shortest:
            return NOTHING
        sure = 1 - 1 / (1 + length)
        return chain(copied(seq.tokens, place, nodes), [sure] * nodes, self.name)

    def _match(self, known: NGramIndex) -> tuple[int, int]:
        """How many tokens agree, and the place behind them."""
        best, behind = 0, 0
        if self.longest > 1:
            for agree, place in known.matches(known.tokens, len(known)):
                if agree >= self.longest:
                    return agree, place
                if agree > best:
                    best, behind = agree, place
        if not best and (place := known.latest(known.tokens[-1])):
            return 1, place
        return best, behind

    def forget(self, seq: Sequence) -> None:
        self._kept.pop(seq.id, None)
