"""Guesses by n-grams that the target was made to say ahead of time, at probes that ride along with each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from foretell.draft.heads.tree import ROOT, BestFirstTree
from foretell.types import Budget, Draft, DrafterTraits, Sequence, StepResult

from .base import Drafter

Gram = tuple[int, ...]

PLACES = 8  # where a token stood before: so many are looked at, latest first
LONGEST = 4  # tokens before a place that are compared with the text's end
COPIED = (0.0, 0.13, 0.4, 0.6, 0.8)  # how often what followed so many equal tokens follows again: measured
SAID, EARLIER, INSIDE = 0.4, 0.2, 0.45  # the same for the latest n-gram, for older ones, for an n-gram's later tokens
PROBES = 3  # of 8 nodes: fewer teach less, more leave too little room for guesses
TOKENS = 4096  # first tokens of n-grams, those that were met last
SCATTER, SALTS = 0x9E3779B97F4A7C15, 64  # to pick tokens all over the text, and others each time


class TokenPositions:
    """Where each token stood last: a value of the tokens it has read."""

    def __init__(self) -> None:
        self.read = 0
        self._places: dict[int, list[int]] = {}

    def catch_up(self, tokens: list[int], length: int) -> None:
        """Read the first `length` tokens; nothing follows the last one yet."""
        for place in range(self.read + 1, length):
            places = self._places.setdefault(tokens[place - 1], [])
            places.append(place)
            if len(places) > PLACES:
                del places[0]
        self.read = max(self.read, length - 1)

    def after(self, token: int) -> list[int]:
        """Places behind a token, earliest first."""
        return self._places.get(token, [])

    @property
    def memory(self) -> int:
        return len(self._places) * 210  # bytes of a token: its entry, its list, the places in it


class Pool:
    """N-grams that the target said, by their first token: the rest of each, latest first."""

    def __init__(self, each: int) -> None:
        """`each` first token keeps so many."""
        self.each = each
        self._rests: OrderedDict[int, tuple[Gram, ...]] = OrderedDict()

    def push(self, first: int, rest: Gram) -> None:
        others = (other for other in self.after(first) if other != rest)
        self._rests[first] = (rest, *others)[: self.each]
        self._rests.move_to_end(first)
        if len(self._rests) > TOKENS:
            self._rests.popitem(last=False)

    def after(self, token: int) -> tuple[Gram, ...]:
        return self._rests.get(token, ())

    @property
    def memory(self) -> int:
        return sum(100 + 80 * len(rests) for rests in self._rests.values())


class Window:
    """The Jacobi window: `levels[l][j]` guesses the token that stands l + j + 1 behind the text's last one.

    Each level is what the target chose after the one before it, a step later: a column is an n-gram in the making.
    """

    def __init__(self, columns: int, depth: int) -> None:
        self.columns, self.depth = columns, depth
        self.levels: list[list[int]] = [[]]

    def plant(self, tree: BestFirstTree[State]) -> Iterator[int]:
        """Hang the window on a tree; stops at each node that was not there before.

        The first level is one chain and each column hangs on its own token of it, so that a token sees the text, the
        first level up to its column and its own column: just the mask the method wants.
        """
        base = ROOT
        for column in zip(*self.levels, strict=True):
            node = base
            for level, token in enumerate(column):
                size = len(tree)
                node = tree.add(node, token)
                base = base if level else node
                if len(tree) > size:
                    yield node

    def move(self, found: list[int | None], grown: int, invent: Callable[[int, int], int]) -> None:
        """The text has `grown`, and the target chose `found` behind the columns (None: not asked).

        `invent` makes a token up, to follow another one; the second number tells apart what must not be alike.
        """
        gone = grown
        if any(token is not None for token in found):
            tops = zip(self.levels[-1], found, strict=True)
            self.levels.append([invent(top, i) if new is None else new for i, (top, new) in enumerate(tops)])
            if len(self.levels) > self.depth:  # the oldest goes, and with it one place
                del self.levels[0]
                gone -= 1
        self.levels = [level[gone:] for level in self.levels]

    def pad(self, last: int, invent: Callable[[int, int], int]) -> None:
        """Make columns up where the text has left room at the end."""
        for column in range(len(self.levels[0]), self.columns):
            token = self.levels[0][-1] if column else last
            for level in self.levels:
                token = invent(token, column)
                level.append(token)

    def ends(self, draft: Draft) -> list[int | None]:
        """The last node of each column, where a draft has it, whoever made the draft."""
        nodes = {pair: node for node, pair in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        found: list[int | None] = []
        base: int | None = ROOT
        for column in zip(*self.levels, strict=True):
            base = node = None if base is None else nodes.get((base, column[0]))
            for token in column[1:]:
                node = None if node is None else nodes.get((node, token))
            found.append(node)
        return found


class _Copy(NamedTuple):
    """A place in the text that is like its end: what stands there may follow."""

    alike: int  # tokens before it that are the same
    place: int
    period: int  # from the place that was found to the text's end


class State(NamedTuple):
    """What may follow a token, which is the text's last one or a guess."""

    token: int
    copies: list[_Copy]
    rests: list[Gram]  # of n-grams that have come true so far


@dataclass
class _Known:
    """What is kept for a sequence."""

    pool: Pool
    text: TokenPositions = field(default_factory=TokenPositions)
    window: Window | None = None  # None: the target's own tokens are not told, so to probe would teach nothing

    def invent(self, tokens: list[int], length: int, token: int, salt: int) -> int:
        """What followed a token when it was last met; else some token of the text, the same one every time."""
        if rests := self.pool.after(token):
            return rests[0][0]
        if places := self.text.after(token):
            return tokens[places[-1]]
        return tokens[((length * SALTS + salt) * SCATTER >> 32) % length]


class LookaheadDrafter(Drafter):
    """Lookahead decoding: of each step's nodes some guess, by n-grams, and some probe, for n-grams of later steps."""

    name = "lookahead"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.3)

    def __init__(self, ngram: int = 2, columns: int = 12, each: int = 4) -> None:
        """A window of `columns` and `ngram` - 1 levels; `each` token keeps so many n-grams that start with it."""
        if ngram < 2:
            raise ValueError(f"ngram must be 2 or more, not {ngram}")
        self.ngram, self.columns, self.each = ngram, columns, each
        self._known: dict[int, _Known] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._guess(seq, budget) if budget.nodes else Draft() for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _guess(self, seq: Sequence, budget: Budget) -> Draft:
        known = self._of(seq)
        known.text.catch_up(seq.tokens, len(seq.tokens))
        start = State(seq.tokens[-1], _copies(known.text, seq.tokens), [])
        tree = BestFirstTree(start, lambda state: _followers(state, seq.tokens, known.pool))
        _mingle(tree, iter(()) if known.window is None else known.window.plant(tree), budget)
        return tree.draft(self.name)

    def observe(self, outcomes: list[StepResult]) -> None:
        for outcome in outcomes:
            if outcome.new_tokens:
                self._learn(outcome, self._of(outcome.scheduled.seq))

    def _learn(self, outcome: StepResult, known: _Known) -> None:
        tokens, length = outcome.scheduled.seq.tokens, outcome.scheduled.length + len(outcome.new_tokens)
        said = outcome.target_tokens or tuple(top[0] for top in outcome.top_tokens)
        known.text.catch_up(tokens, length)
        if not said:
            known.window = None
            return
        window = known.window = known.window or Window(self.columns, self.ngram - 1)
        found = [None if end is None else said[end + 1] for end in window.ends(outcome.draft)]
        self._push(outcome, said, known.pool)
        invent = partial(known.invent, tokens, length)
        window.move(found, len(outcome.new_tokens), invent)
        window.pad(tokens[length - 1], invent)

    def _push(self, outcome: StepResult, said: tuple[int, ...], pool: Pool) -> None:
        """Each row ends an n-gram, and shorter ones; those of the text itself come last and so first in the pool."""
        draft, length = outcome.draft, outcome.scheduled.length
        paths = [tuple(outcome.scheduled.seq.tokens[max(0, length + 1 - self.ngram) : length])]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*paths[parent + 1], token)[1 - self.ngram :])
        path = set() if outcome.verify_result is None else set(outcome.verify_result.accepted_path)
        for node in sorted(range(len(draft)), key=path.__contains__):
            gram = (*paths[node + 1], said[node + 1])
            for start in range(len(gram) - 1):
                pool.push(gram[start], gram[start + 1 :])

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq.id, None)

    def _of(self, seq: Sequence) -> _Known:
        known = self._known.get(seq.id)
        if known is None:
            known = self._known[seq.id] = _Known(Pool(self.each))
        return known

    @property
    def memory(self) -> int:
        return sum(known.text.memory + known.pool.memory for known in self._known.values())


def _mingle(tree: BestFirstTree[State], probes: Iterator[int], budget: Budget) -> None:
    """Guesses and probes in turn, so that a draft that is cut keeps some of both."""
    planted, growing = 0, True
    while len(tree) < budget.nodes:
        room = (len(tree) + 1 if growing else budget.nodes) * PROBES // 8
        if planted < room and next(probes, None) is not None:
            planted += 1
        elif growing:
            growing = tree.grow(budget.min_probability)
        else:
            return


def _copies(text: TokenPositions, tokens: list[int]) -> list[_Copy]:
    """Where the text was like its end before, latest first."""
    return [_Copy(_alike(tokens, place), place, len(tokens) - place) for place in reversed(text.after(tokens[-1]))]


def _alike(tokens: list[int], place: int) -> int:
    """Tokens before a place that also end the text, up to LONGEST; the last one is known to."""
    alike, most = 1, min(LONGEST, place)
    while alike < most and tokens[place - 1 - alike] == tokens[-1 - alike]:
        alike += 1
    return alike


def _followers(state: State, tokens: list[int], pool: Pool) -> Iterator[tuple[int, float, State]]:
    """What copies and n-grams say, likeliest first: each is as likely as it was found where those before it failed."""
    said: list[tuple[float, int, _Copy | Gram]] = []
    for copy in state.copies:
        # Where the text ends, a copy goes on with itself, as a repetition would.
        place = copy.place if copy.place < len(tokens) else copy.place - copy.period
        said.append((COPIED[min(copy.alike, LONGEST)], tokens[place], _Copy(copy.alike + 1, place + 1, copy.period)))
    said += [(INSIDE, rest[0], rest[1:]) for rest in state.rests]
    said += [(EARLIER if rank else SAID, rest[0], rest[1:]) for rank, rest in enumerate(pool.after(state.token))]
    said.sort(key=lambda each: -each[0])
    behind: dict[int, State] = {}
    for _, token, after in said:
        found = behind.setdefault(token, State(token, [], []))
        if isinstance(after, _Copy):
            found.copies.append(after)
        elif after:
            found.rests.append(after)
    left = 1.0
    for share, token, _ in said:
        if token in behind:
            yield token, left * share, behind.pop(token)
            left *= 1 - share
