"""Copies what mostly followed when a text ended like this: in the text itself, or in earlier ones of its tenant."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from foretell.types import Budget, Draft, DrafterTraits, Sequence, StepResult

from .base import Drafter
from .ngram import END, Match, NGramIndex, chain, copied

TRIES = 4  # lengths of match followed for a guess, longest first
RETURN = 6  # tokens that must agree before one that differs, for the copy to be gone on with behind it
DOUBT = 0.5  # how sure it is then, of how sure it would be


class Store:
    """Finished texts of each tenant on two shelves: when the newer one is full, the older one goes with its texts."""

    def __init__(self, tokens: int, tenants: int) -> None:
        self.half, self.tenants = tokens // 2, tenants  # to take out single texts would mean to rebuild
        self._shelves: OrderedDict[str, list[NGramIndex]] = OrderedDict()  # least recently used first

    def add(self, tenant: str, text: list[int]) -> None:
        text = text[-self.half + 1 :] if self.half > 1 else []
        if not text or not self.tenants:
            return
        shelf = self._shelves.setdefault(tenant, [NGramIndex()])
        self.touch(tenant)
        if len(shelf[0]) + len(text) + 1 > self.half:
            shelf[:] = [NGramIndex(), shelf[0]]
        shelf[0].tokens += [*text, END]
        shelf[0].catch_up()
        if len(self._shelves) > self.tenants:
            self._shelves.popitem(last=False)

    def touch(self, tenant: str) -> None:
        if tenant in self._shelves:
            self._shelves.move_to_end(tenant)

    def texts(self, tenant: str) -> list[NGramIndex]:
        """Newest first."""
        return self._shelves.get(tenant, [])

    @property
    def memory(self) -> int:
        return sum(each.memory for shelf in self._shelves.values() for each in shelf)


class _Path(NamedTuple):
    """A guess: its tokens, how likely each is after those before it, and how many may be expected to be right."""

    tokens: list[int]
    shares: list[float]
    score: float


class SuffixDrafter(Drafter):
    """SuffixDecoding: of all matches the one whose likeliest continuation promises most; long matches guess far."""

    name = "suffix"
    traits = DrafterTraits(is_free=True)

    def __init__(
        self,
        factor: float = 1.0,
        offset: float = 1.0,
        min_token_prob: float = 0.1,
        store_tokens: int = 65_536,
        tenants: int = 16,
    ) -> None:
        """A match of m tokens guesses `factor` * m + `offset`; `store_tokens` are kept for each of `tenants`."""
        self.factor, self.offset, self.min_token_prob = factor, offset, min_token_prob
        self.store = Store(store_tokens, tenants)
        self._kept: dict[int, NGramIndex] = {}  # of the texts themselves

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._guess(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._caught_up(seq)

    def observe(self, outcomes: list[StepResult]) -> None:
        """A tenant who writes is in use; to ask for a guess must not count, or guesses would depend on who asked."""
        for tenant in dict.fromkeys(outcome.scheduled.seq.request.tenant for outcome in outcomes):
            self.store.touch(tenant)

    def forget(self, seq: Sequence) -> None:
        self._kept.pop(seq.id, None)
        if seq.finish_reason in ("stop", "length"):
            self.store.add(seq.request.tenant, seq.tokens[len(seq.request.prompt) :])

    @property
    def memory(self) -> int:
        return self.store.memory + sum(own.memory for own in self._kept.values())

    def _caught_up(self, seq: Sequence) -> NGramIndex:
        own = self._kept.get(seq.id)
        if own is None:
            own = self._kept[seq.id] = NGramIndex(seq.tokens)
        own.catch_up()
        return own

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        if not nodes:
            return NOTHING
        own = self._caught_up(seq)
        text, tokens = len(seq.tokens), seq.tokens
        best = EMPTY
        for known in (own, *self.store.texts(seq.request.tenant)):  # the text itself wins ties
            best = self._better(known, known.matches(tokens, text), nodes, best, 0)
        if best is EMPTY:  # nothing like it; perhaps it goes on copying behind one token that differs
            before = own.matches(tokens, text - 1)
            agree = [match for match in before if match[0] >= RETURN and match[1] + 1 < text]
            best = self._better(own, agree, nodes, best, 1)
        if best.score < 1:
            for known in (own, *self.store.texts(seq.request.tenant)):
                ones = [(1, place) for place in known.after(tokens[-1])]
                best = self._better(known, ones, nodes, best, 0)
        return chain(best.tokens, best.shares, self.name) if best.tokens else NOTHING

    def _better(self, known: NGramIndex, matches: list[Match], nodes: int, best: _Path, skipped: int) -> _Path:
        """The better of `best` and what follows the matches; a shorter one must promise more than a longer one."""
        if not matches:
            return best
        for length in sorted({match[0] for match in matches}, reverse=True)[:TRIES]:
            most = min(nodes, int(self.factor * length + self.offset))
            if most <= best.score:
                break
            places = [place + skipped for agree, place in matches if agree >= length]
            path = self._follow(known.tokens, places, most)
            if path.score > best.score:
                sure = (1 - 1 / (1 + length)) * (DOUBT if skipped else 1.0)
                best = _Path(path.tokens, [share * sure for share in path.shares], path.score)
        return best

    def _follow(self, tokens: list[int], places: list[int], most: int) -> _Path:
        """The likeliest tokens from some places on, as often as they occurred; of equals the latest."""
        path: list[int] = []
        shares: list[float] = []
        prob, score = 1.0, 0.0
        while len(path) < most:
            if len(places) == 1:
                rest = copied(tokens, places[0], most)[len(path) :]
                return _Path(path + rest, shares + [1.0] * len(rest), score + prob * len(rest))
            found = [_at(tokens, place, len(path)) for place in places]
            votes = Counter(found)
            token, count = max(votes.items(), key=lambda vote: vote[1])
            prob *= count / len(places)
            if token == END or prob < self.min_token_prob:
                break
            path.append(token)
            shares.append(count / len(places))
            score += prob
            places = [place for place, after in zip(places, found, strict=True) if after == token]
        return _Path(path, shares, score)


NOTHING, EMPTY = Draft(), _Path([], [], 0.0)


def _at(tokens: list[int], place: int, offset: int) -> int:
    """The token so far behind a place; where the text ends, it goes on with itself, as a repetition would."""
    at, size = place + offset, len(tokens)
    return tokens[at] if at < size else tokens[place + (at - size) % (size - place)]
