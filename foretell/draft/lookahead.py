"""Lookahead decoding: drafts n-grams that the target generated ahead of time in a Jacobi window (Fu et al. 2024).

The window's tokens are part of each step's draft, so the target's argmax after them comes at no extra forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from foretell.draft.base import Drafter
from foretell.draft.heads.tree import ROOT, BestFirstTree
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult

NGram = tuple[int, ...]

MAX_POSITIONS = 8  # positions kept for each token, the latest ones
MAX_MATCH = 4  # tokens before a position that are compared with the sequence's end
# Measured probability that the token after a match of 0 to 4 tokens follows again.
COPY_PROBABILITY = (0.0, 0.13, 0.4, 0.6, 0.8)
LATEST_PROBABILITY = 0.4  # that the latest n-gram of a token continues,
EARLIER_PROBABILITY = 0.2  # that an earlier one does,
INNER_PROBABILITY = 0.45  # and that an n-gram continues after its second token
WINDOW_NODES = 3  # of 8 nodes go to the window: fewer teach less, more leave too little for draft tokens
POOL_TOKENS = 4096  # first tokens of n-grams that are kept, most recently used
HASH_FACTOR = 0x9E3779B97F4A7C15  # picks filler tokens all over the sequence,
NUM_SALTS = 64  # and others for each column


class TokenPositions:
    """The latest positions after each token; a function of the tokens read so far."""

    def __init__(self) -> None:
        self.num_read = 0
        self._positions: dict[int, list[int]] = {}

    def catch_up(self, tokens: list[int], length: int) -> None:
        """Read the first `length` tokens; nothing follows the last one yet."""
        for position in range(self.num_read + 1, length):
            positions = self._positions.setdefault(tokens[position - 1], [])
            positions.append(position)
            if len(positions) > MAX_POSITIONS:
                del positions[0]
        self.num_read = max(self.num_read, length - 1)

    def after(self, token: int) -> list[int]:
        """Return positions after a token, earliest first."""
        return self._positions.get(token, [])

    @property
    def memory(self) -> int:
        """Bytes: 210 for each token, its entry, its list and its positions."""
        return len(self._positions) * 210


class NGramPool:
    """N-grams that the target generated, by their first token: the rest of each, latest first."""

    def __init__(self, per_token: int) -> None:
        """`per_token` n-grams are kept for each first token."""
        self.per_token = per_token
        self._rests: OrderedDict[int, tuple[NGram, ...]] = OrderedDict()

    def push(self, first: int, rest: NGram) -> None:
        """Add an n-gram as the latest of its first token."""
        others = (other for other in self.after(first) if other != rest)
        self._rests[first] = (rest, *others)[: self.per_token]
        self._rests.move_to_end(first)
        if len(self._rests) > POOL_TOKENS:
            self._rests.popitem(last=False)

    def after(self, token: int) -> tuple[NGram, ...]:
        """Return the rests of the n-grams that start with a token."""
        return self._rests.get(token, ())

    @property
    def memory(self) -> int:
        """Return an estimate of the pool's size in bytes."""
        return sum(100 + 80 * len(rests) for rests in self._rests.values())


class JacobiWindow:
    """The Jacobi window: `levels[l][j]` predicts the token l + j + 1 positions after the sequence's last one.

    Each level is the target's argmax after the level before, one step later, so a column grows into an n-gram.
    """

    def __init__(self, columns: int, depth: int) -> None:
        self.columns, self.depth = columns, depth
        self.levels: list[list[int]] = [[]]

    def add_to_tree(self, tree: BestFirstTree[DraftState]) -> Iterator[int]:
        """Add the window to a tree, and yield each node that is new.

        The first level is one chain, and each column continues from its own token of it. So a token attends to the
        sequence, the first level up to its column, and its own column: the attention mask of the method.
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

    def advance(self, found: list[int | None], num_new_tokens: int, fill: Callable[[int, int], int]) -> None:
        """Shift the window by the new tokens of the sequence and add the target's argmax after each column as a level.

        A column that was not run has None; `fill(token, salt)` returns a filler token to follow another one.
        """
        shift = num_new_tokens
        if any(token is not None for token in found):
            tops = zip(self.levels[-1], found, strict=True)
            self.levels.append([fill(top, i) if new is None else new for i, (top, new) in enumerate(tops)])
            if len(self.levels) > self.depth:  # the oldest level leaves, which shifts all others by one position
                del self.levels[0]
                shift -= 1
        self.levels = [level[shift:] for level in self.levels]

    def pad(self, last: int, fill: Callable[[int, int], int]) -> None:
        """Add filler columns at the end of the window."""
        for column in range(len(self.levels[0]), self.columns):
            token = self.levels[0][-1] if column else last
            for level in self.levels:
                token = fill(token, column)
                level.append(token)

    def last_nodes(self, draft: Draft) -> list[int | None]:
        """Return the last node of each column in a draft of any drafter; None if it is not there."""
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
    """An earlier position of the sequence whose preceding tokens match the sequence's end."""

    num_matching: int
    position: int
    period: int  # from the matching position to the sequence's end


class DraftState(NamedTuple):
    """The candidates that may follow the last token or a draft token."""

    token: int
    copies: list[_Copy]
    rests: list[NGram]  # of n-grams that have matched so far


@dataclass
class _SequenceState:
    """Lookahead state of one sequence: its n-grams, their positions, and its Jacobi window."""

    pool: NGramPool
    positions: TokenPositions = field(default_factory=TokenPositions)
    window: JacobiWindow | None = None  # None: the target's tokens are not returned, so a window would teach nothing

    def fill(self, tokens: list[int], length: int, token: int, salt: int) -> int:
        """Return what last followed a token, or else a pseudo-random token of the sequence."""
        if rests := self.pool.after(token):
            return rests[0][0]
        if positions := self.positions.after(token):
            return tokens[positions[-1]]
        return tokens[((length * NUM_SALTS + salt) * HASH_FACTOR >> 32) % length]


class LookaheadDrafter(Drafter):
    """Lookahead decoding: some nodes of each step draft from n-grams, others extend the window for later steps."""

    name = "lookahead"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.3)

    def __init__(self, ngram: int = 2, columns: int = 12, per_token: int = 4) -> None:
        """A window of `columns` and `ngram` - 1 levels; `per_token` n-grams are kept for each first token."""
        if ngram < 2:
            raise ValueError(f"ngram must be 2 or more, not {ngram}")
        self.ngram, self.columns, self.per_token = ngram, columns, per_token
        self._states: dict[int, _SequenceState] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._draft(seq, budget) if budget.nodes else NO_DRAFT for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _draft(self, seq: Sequence, budget: Budget) -> Draft:
        state = self._state(seq)
        state.positions.catch_up(seq.tokens, len(seq.tokens))
        start = DraftState(seq.tokens[-1], _copies(state.positions, seq.tokens), [])
        tree = BestFirstTree(start, lambda each: _continuations(each, seq.tokens, state.pool))
        _fill_tree(tree, iter(()) if state.window is None else state.window.add_to_tree(tree), budget)
        return tree.draft(self.name)

    def observe(self, results: list[StepResult]) -> None:
        for result in results:
            if result.new_tokens:
                self._learn(result, self._state(result.scheduled.seq))

    def _learn(self, result: StepResult, state: _SequenceState) -> None:
        tokens, length = result.scheduled.seq.tokens, result.scheduled.length + len(result.new_tokens)
        argmax = result.target_tokens or tuple(top[0] for top in result.top_tokens)
        state.positions.catch_up(tokens, length)
        if not argmax:
            state.window = None
            return
        window = state.window = state.window or JacobiWindow(self.columns, self.ngram - 1)
        found = [None if node is None else argmax[node + 1] for node in window.last_nodes(result.draft)]
        self._push_ngrams(result, argmax, state.pool)
        fill = partial(state.fill, tokens, length)
        window.advance(found, len(result.new_tokens), fill)
        window.pad(tokens[length - 1], fill)

    def _push_ngrams(self, result: StepResult, argmax: tuple[int, ...], pool: NGramPool) -> None:
        """Push the n-grams that end at each row, and their suffixes; those of accepted rows last, as the latest."""
        draft, length = result.draft, result.scheduled.length
        paths = [tuple(result.scheduled.seq.tokens[max(0, length + 1 - self.ngram) : length])]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*paths[parent + 1], token)[1 - self.ngram :])
        accepted = set() if result.verify_result is None else set(result.verify_result.accepted_path)
        for node in sorted(range(len(draft)), key=accepted.__contains__):
            ngram = (*paths[node + 1], argmax[node + 1])
            for start in range(len(ngram) - 1):
                pool.push(ngram[start], ngram[start + 1 :])

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    def _state(self, seq: Sequence) -> _SequenceState:
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _SequenceState(NGramPool(self.per_token))
        return state

    @property
    def memory(self) -> int:
        """Bytes of the state of all sequences."""
        return sum(state.positions.memory + state.pool.memory for state in self._states.values())


def _fill_tree(tree: BestFirstTree[DraftState], window_nodes: Iterator[int], budget: Budget) -> None:
    """Add draft nodes and window nodes in turn, so that a draft that is cut keeps some of both."""
    num_window_nodes, grows = 0, True
    while len(tree) < budget.nodes:
        limit = (len(tree) + 1 if grows else budget.nodes) * WINDOW_NODES // 8
        if num_window_nodes < limit and next(window_nodes, None) is not None:
            num_window_nodes += 1
        elif grows:
            grows = tree.grow(budget.min_probability)
        else:
            return


def _copies(positions: TokenPositions, tokens: list[int]) -> list[_Copy]:
    """Return the positions whose preceding tokens match the sequence's end, latest first."""
    return [
        _Copy(_num_matching(tokens, position), position, len(tokens) - position)
        for position in reversed(positions.after(tokens[-1]))
    ]


def _num_matching(tokens: list[int], position: int) -> int:
    """Return how many tokens before a position match the end, up to MAX_MATCH; the last one is known to."""
    count, limit = 1, min(MAX_MATCH, position)
    while count < limit and tokens[position - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


def _continuations(state: DraftState, tokens: list[int], pool: NGramPool) -> Iterator[tuple[int, float, DraftState]]:
    """Yield the tokens that copies and n-grams predict, most likely first: each with its probability given that those
    before it are wrong."""
    predicted: list[tuple[float, int, _Copy | NGram]] = []
    for copy in state.copies:
        # At the end of the sequence a copy repeats, as a loop would.
        position = copy.position if copy.position < len(tokens) else copy.position - copy.period
        after = _Copy(copy.num_matching + 1, position + 1, copy.period)
        predicted.append((COPY_PROBABILITY[min(copy.num_matching, MAX_MATCH)], tokens[position], after))
    predicted += [(INNER_PROBABILITY, rest[0], rest[1:]) for rest in state.rests]
    predicted += [
        (EARLIER_PROBABILITY if rank else LATEST_PROBABILITY, rest[0], rest[1:])
        for rank, rest in enumerate(pool.after(state.token))
    ]
    predicted.sort(key=lambda each: -each[0])
    next_states: dict[int, DraftState] = {}
    for _, token, rest_or_copy in predicted:
        next_state = next_states.setdefault(token, DraftState(token, [], []))
        if isinstance(rest_or_copy, _Copy):
            next_state.copies.append(rest_or_copy)
        elif rest_or_copy:
            next_state.rests.append(rest_or_copy)
    left = 1.0
    for probability, token, _ in predicted:
        if token in next_states:
            yield token, left * probability, next_states.pop(token)
            left *= 1 - probability
