"""Copies what mostly followed when a text ended like this: in the text itself, or in earlier ones of its tenant."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from foretell.types import Budget, Draft, Outcome, Sequence

from .base import Drafter

NOTHING = -2  # the token of a state that nothing follows yet
END = -1  # stands behind each text of the store
ROOT = 0
DEEP = 32  # suffixes counted for a token: in a text that repeats itself there are as many as tokens
WINDOW = 32  # the longest match looked for in the store
TRIES = 8  # suffixes followed for a guess, longest first


class Automaton:
    """Knows how often each run of tokens was followed, and by which token most often; of equals the most recent."""

    def __init__(self) -> None:
        self.lengths = array("i", [0])
        self.links = array("i", [-1])
        self.counts = array("i", [0])  # occurrences that were followed by a token
        self.tokens = array("i", [NOTHING])
        self.states = array("i", [ROOT])
        # Only of states that several tokens follow: most have one, and a dict each would multiply the memory.
        self.kids: dict[int, dict[int, int]] = {}
        self.last = ROOT
        self.read = self.edges = 0

    @property
    def memory(self) -> int:
        """Bytes, from the sizes of CPython's objects: a small dict takes 232, each of its entries two integers."""
        arrays = (self.lengths, self.links, self.counts, self.tokens, self.states, self.kids)
        return sum(map(sys.getsizeof, arrays)) + len(self.kids) * (232 + 32) + self.edges * 64

    def child(self, state: int, token: int) -> int:
        """The state after `token`, or -1."""
        if self.tokens[state] == token:
            return self.states[state]
        kids = self.kids.get(state)
        return -1 if kids is None else kids.get(token, -1)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._append(token)
        self.read += len(tokens)

    def chain(self, state: int, most: int) -> list[int]:
        """`state` and its suffixes, longest first, without the empty one."""
        found: list[int] = []
        while state > ROOT and len(found) < most:
            found.append(state)
            state = self.links[state]
        return found

    def _append(self, token: int) -> None:
        self._count(token)
        links, child = self.links, self.child
        grown = self._add(self.lengths[self.last] + 1)
        place, target = self.last, -1
        while place >= 0 and (target := child(place, token)) < 0:
            self._join(place, token, grown)
            place = links[place]
        links[grown] = ROOT if place < 0 else self._suffix(place, token, target)
        self.last = grown

    def _count(self, token: int) -> None:
        """Every suffix of the text is now followed by `token`."""
        counts, chain = self.counts, self.chain(self.last, DEEP)
        for state in chain:
            counts[state] += 1
        for state in chain:
            if self.tokens[state] != token and (target := self.child(state, token)) >= 0:
                self._prefer(state, token, target)

    def _prefer(self, state: int, token: int, target: int) -> None:
        """Make `token` the likeliest if it is: `target` has just occurred once more than it was followed."""
        if self.counts[self.states[state]] <= self.counts[target] + 1:
            self.tokens[state], self.states[state] = token, target

    def _add(self, length: int) -> int:
        self.lengths.append(length)
        self.links.append(ROOT)
        self.counts.append(0)
        self.tokens.append(NOTHING)
        self.states.append(ROOT)
        return len(self.lengths) - 1

    def _join(self, state: int, token: int, target: int) -> None:
        """Let `token` lead from `state` to `target`."""
        kids, likeliest = self.kids.get(state), self.tokens[state]
        if likeliest in (NOTHING, token):
            self.tokens[state], self.states[state] = token, target
        elif kids is None:
            kids = self.kids[state] = {likeliest: self.states[state]}
            self.edges += 1
        if kids is not None:
            self.edges += token not in kids
            kids[token] = target
            self._prefer(state, token, target)

    def _suffix(self, place: int, token: int, target: int) -> int:
        """The state of just the run that ends `place`, and `token`: `target`, or what is split off it."""
        length = self.lengths[place] + 1
        if self.lengths[target] == length:
            return target
        part = self._add(length)
        self._copy(target, part)
        self.links[target] = part
        while place >= 0 and self.child(place, token) == target:
            self._join(place, token, part)
            place = self.links[place]
        return part

    def _copy(self, state: int, part: int) -> None:
        """Shorter runs of `state` get their own: so far they occurred with the longer ones, now more often."""
        for values in (self.links, self.counts, self.tokens, self.states):
            values[part] = values[state]
        if state in self.kids:
            self.kids[part] = self.kids[state].copy()
            self.edges += len(self.kids[part])


@dataclass(slots=True)
class _Cursor:
    """The longest run of at most WINDOW tokens that ends a text and occurs in an automaton."""

    automaton: Automaton
    size: int = -1  # what the automaton had read: where it has learnt, a longer run may be in it
    read: int = 0
    state: int = ROOT
    length: int = 0

    def catch_up(self, tokens: list[int]) -> None:
        if self.size != self.automaton.read or len(tokens) - self.read >= WINDOW:
            self.size, self.state, self.length = self.automaton.read, ROOT, 0
            self.read = max(0, len(tokens) - WINDOW)
        for token in tokens[self.read :]:
            self._step(token)
        self.read = len(tokens)

    def _step(self, token: int) -> None:
        automaton, state = self.automaton, self.state
        while (after := automaton.child(state, token)) < 0 and state:
            state = automaton.links[state]
            self.length = automaton.lengths[state]
        self.state = ROOT if after < 0 else after
        self.length = 0 if after < 0 else min(self.length + 1, WINDOW)
        if self.length and automaton.lengths[automaton.links[self.state]] >= self.length:
            self.state = automaton.links[self.state]


class Store:
    """Finished texts of each tenant in two automata: when the newer one is full, the older one goes with its texts."""

    def __init__(self, tokens: int, tenants: int) -> None:
        self.half, self.tenants = tokens // 2, tenants  # to take out single texts would mean to rebuild
        self._shelves: OrderedDict[str, list[Automaton]] = OrderedDict()  # least recently used first

    def add(self, tenant: str, text: list[int]) -> None:
        text = text[-self.half + 1 :] if self.half > 1 else []
        if not text or not self.tenants:
            return
        shelf = self._shelves.setdefault(tenant, [Automaton()])
        self.touch(tenant)
        if shelf[0].read + len(text) + 1 > self.half:
            shelf[:] = [Automaton(), shelf[0]]
        shelf[0].extend([*text, END])
        if len(self._shelves) > self.tenants:
            self._shelves.popitem(last=False)

    def touch(self, tenant: str) -> None:
        if tenant in self._shelves:
            self._shelves.move_to_end(tenant)

    def automata(self, tenant: str) -> list[Automaton]:
        """Newest first."""
        return self._shelves.get(tenant, [])

    @property
    def memory(self) -> int:
        return sum(automaton.memory for shelf in self._shelves.values() for automaton in shelf)


class _Match(NamedTuple):
    """Where an automaton knows how the text ends: states of its suffixes, longest first."""

    automaton: Automaton
    states: list[int]
    length: int  # of the longest
    ended: Set[int] = frozenset()  # states the automaton's own text ends in: nothing follows there yet


class _Path(NamedTuple):
    """A guess: its tokens, how likely each is after those before it, and how many may be expected to be right."""

    steps: list[tuple[int, float]]
    score: float


class SuffixDrafter(Drafter):
    """SuffixDecoding: of all matches the one whose likeliest continuation promises most; long matches guess far."""

    name = "suffix"
    free = True

    def __init__(
        self,
        factor: float = 1.0,
        offset: float = 0.0,
        min_token_prob: float = 0.1,
        store_tokens: int = 65_536,
        tenants: int = 16,
    ) -> None:
        """A match of m tokens guesses `factor` * m + `offset`; `store_tokens` are kept for each of `tenants`."""
        self.factor, self.offset, self.min_token_prob = factor, offset, min_token_prob
        self.store = Store(store_tokens, tenants)
        self._kept: dict[int, tuple[Automaton, list[_Cursor]]] = {}  # the text itself, and where it is in the store

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._guess(seq, budget.nodes) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, outcomes: list[Outcome]) -> None:
        """A tenant who writes is in use; to ask for a guess must not count, or guesses would depend on who asked."""
        for tenant in dict.fromkeys(outcome.share.seq.request.tenant for outcome in outcomes):
            self.store.touch(tenant)

    def forget(self, seq: Sequence) -> None:
        self._kept.pop(seq.id, None)
        if seq.finish in ("stop", "length"):
            self.store.add(seq.request.tenant, seq.tokens[len(seq.request.prompt) :])

    @property
    def memory(self) -> int:
        return self.store.memory + sum(own.memory for own, _ in self._kept.values())

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        if not nodes:
            return Draft()
        best = _Path([], 0.0)
        for match in self._matches(seq):
            best = self._better(match, nodes, best)
        draft = Draft.chain([token for token, _ in best.steps], self.name)
        return replace(draft, confidence=tuple(share for _, share in best.steps))

    def _matches(self, seq: Sequence) -> list[_Match]:
        """In the text itself, which wins ties, then in the store."""
        own, cursors = self._kept.setdefault(seq.id, (Automaton(), []))
        own.extend(seq.tokens[own.read :])
        self._move(cursors, seq)
        chain = own.chain(own.last, DEEP)
        return [
            _Match(own, chain[1 : TRIES + 1], len(seq.tokens), set(chain)),
            *(_Match(c.automaton, c.automaton.chain(c.state, TRIES), c.length) for c in cursors),
        ]

    def _move(self, cursors: list[_Cursor], seq: Sequence) -> None:
        """Bring the cursors to the end of the text, in the automata there are by now."""
        automata = self.store.automata(seq.request.tenant)
        if [cursor.automaton for cursor in cursors] != automata:
            cursors[:] = [_Cursor(automaton) for automaton in automata]
        for cursor in cursors:
            cursor.catch_up(seq.tokens)

    def _better(self, match: _Match, nodes: int, best: _Path) -> _Path:
        """The better of `best` and what follows the match; a shorter suffix must promise more than a longer one."""
        for state in match.states:
            length = min(match.automaton.lengths[state], match.length)
            most = min(nodes, int(self.factor * length + self.offset))
            if most <= best.score:
                break
            path = _follow(match, state, most, self.min_token_prob)
            best = path if path.score > best.score else best
        return best


def _follow(match: _Match, state: int, most: int, min_prob: float) -> _Path:
    """The likeliest tokens from `state` on."""
    automaton, prob, score = match.automaton, 1.0, 0.0
    path: list[tuple[int, float]] = []
    while len(path) < most:
        if automaton.tokens[state] == NOTHING:  # the text ends here, and goes on with itself as a repetition would
            state = automaton.links[state]
        token, after = automaton.tokens[state], automaton.states[state]
        share = min(1.0, (automaton.counts[after] + (after in match.ended)) / automaton.counts[state])
        prob *= share
        if token == END or prob < min_prob:
            break
        path.append((token, share))
        score, state = score + prob, after
    return _Path(path, score)
