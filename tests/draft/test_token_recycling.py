"""Guesses from what the target found likely before: trees by likelihood, tables by tenant."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from foretell.draft.heads.tree import BestFirstTree
from foretell.draft.token_recycling import (
    NUM_SUCCESSORS,
    RANK_PROBABILITIES,
    SuccessorTable,
    TokenRecyclingDrafter,
    extend_context,
)
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, StepResult, VerifyResult

Rows = tuple[tuple[int, ...], ...]


def sequence(number: int, tokens: list[int], tenant: str = "", prompt: int = 0) -> Sequence:
    request = Request(str(number), tuple(tokens[:prompt]), SamplingParams(), 0, 100_000, tenant=tenant)
    return Sequence(number, request, list(tokens))


def step(
    drafter: TokenRecyclingDrafter, seq: Sequence, draft: Draft, path: tuple[int, ...], token: int, top: Rows
) -> StepResult:
    """Let a sequence grow by what was accepted and `token`."""
    share = ScheduledSequence.of(seq, 1)
    kept = (*(draft.tokens[node] for node in path), token)
    seq.tokens += kept
    outcome = StepResult(share, draft, VerifyResult(path, token), (), kept, top_tokens=top)
    drafter.observe([outcome])
    return outcome


def guess(
    drafter: TokenRecyclingDrafter, tokens: list[int], nodes: int = 8, tenant: str = "", floor: float = 0.0
) -> Draft:
    return drafter.propose([sequence(-1, tokens, tenant)], [Budget(nodes, min_probability=floor)])[0]


def below(draft: Draft, *path: int) -> list[int]:
    """The tokens that stand behind a path of tokens."""
    node = -1
    for token in path:
        node = next(child for child in draft.children(node) if draft.tokens[child] == token)
    return [draft.tokens[child] for child in draft.children(node)]


def test_a_first_token_waits_for_no_reading() -> None:
    drafter = TokenRecyclingDrafter()
    seq, short = (sequence(number, [1, 2, 8], prompt=3) for number in (0, 1))
    for each in (seq, short):
        step(drafter, each, Draft(), (), 9, ((9,),))
    drafter.forget(short)
    assert guess(drafter, [1]).tokens == ()
    step(drafter, seq, Draft(), (), 4, ((4,),))
    assert guess(drafter, [1]).tokens[:2] == (2, 8)
    assert not drafter._prompt_pending


def test_every_row_teaches_whether_its_guess_stood_or_not() -> None:
    drafter, draft = TokenRecyclingDrafter(), Draft((20, 30, 40), (-1, 0, -1))
    step(drafter, sequence(0, [10]), draft, (0,), 21, ((20, 11), (21, 12), (31, 13), (41, 14)))
    assert below(guess(drafter, [10])) == [20, 11]
    assert below(guess(drafter, [20])) == [21, 12]
    assert below(guess(drafter, [30])) == [31, 13], "behind a node that was not reached"
    assert below(guess(drafter, [40])) == [41, 14], "behind a node that was rejected"
    assert below(guess(drafter, [10]), 20) == [21, 12]
    assert guess(drafter, [99]).tokens == ()
    assert guess(drafter, [10]).source == "recycle"
    for token in (30, 40):
        step(drafter, sequence(token, [token]), Draft(), (), 9, ((9,),))
    assert below(guess(drafter, [20, 30])) == [31, 13], "and what stood before it counts"
    assert below(guess(drafter, [10, 40])) == [41, 14]


def test_the_text_says_more_than_guesses_and_the_latest_text_most() -> None:
    drafter = TokenRecyclingDrafter()
    step(drafter, sequence(0, [1]), Draft((5,), (-1,)), (), 9, ((9,), (50,)))
    assert below(guess(drafter, [5])) == [50], "a guess tells where nothing else does"
    step(drafter, sequence(1, [5]), Draft(), (), 51, ((51, 50),))
    assert below(guess(drafter, [5])) == [51, 50]
    step(drafter, sequence(2, [1]), Draft((5,), (-1,)), (), 9, ((9,), (52,)))
    assert below(guess(drafter, [5])) == [51, 50], "and is silent where the text has spoken"
    step(drafter, sequence(3, [5]), Draft(), (), 53, ((53, 54),))
    assert below(guess(drafter, [5])) == [53, 54]


def test_longer_runs_tell_more() -> None:
    drafter = TokenRecyclingDrafter()
    for number, before in enumerate(([1, 2, 7], [3, 2, 7], [4, 7], [7])):
        step(drafter, sequence(number, before), Draft(), (), 60 + number, ((60 + number,),))
    assert guess(drafter, [1, 2, 7], 1).tokens == (60,)
    assert guess(drafter, [9, 2, 7], 1).tokens == (61,), "two tokens, the latest time"
    assert guess(drafter, [9, 9, 7], 1).tokens == (63,)


def test_a_prompt_is_read_once_and_the_latest_follower_stands_first() -> None:
    drafter = TokenRecyclingDrafter()
    seq = sequence(0, [1, 2, 8, 3, 2, 9], prompt=6)
    for token in (5, 6):
        step(drafter, seq, Draft(), (), token, ((token,),))
    assert below(guess(drafter, [2])) == [9, 8]
    assert below(guess(drafter, [1, 2])) == [8]
    assert below(guess(drafter, [9])) == [5]
    step(drafter, sequence(1, [2]), Draft(), (), 7, ((7,),))
    step(drafter, seq, Draft(), (), 4, ((4,),))
    assert below(guess(drafter, [2])) == [7], "its third step does not read the prompt again"


def test_without_the_likeliest_tokens_the_text_still_teaches() -> None:
    drafter = TokenRecyclingDrafter()
    step(drafter, sequence(0, [1]), Draft((2, 3), (-1, 0)), (0,), 4, ())
    assert below(guess(drafter, [1]), 2) == [4]
    step(drafter, sequence(1, [1]), Draft(), (), 6, (tuple(range(20)),))
    assert below(guess(drafter, [1], 30)) == list(range(NUM_SUCCESSORS)), "more than it wants, for another's sake"


def all_paths(table: SuccessorTable, context: tuple[int, ...], longest: int) -> list[tuple[tuple[int, ...], float]]:
    """The definition: every path of known successors with its chance, the likeliest first."""
    found: list[tuple[tuple[int, ...], float]] = []
    level: list[tuple[tuple[int, ...], tuple[int, ...], float]] = [((), context, 1.0)]
    for _ in range(longest):
        level = [
            ((*path, token), extend_context(context, token), chance * share)
            for path, context, chance in level
            for token, share in table.successors(context)
        ]
        found += [(path, chance) for path, _, chance in level]
    return sorted(found, key=lambda each: -each[1])


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_is_the_likeliest_one(seed: int) -> None:
    rng = random.Random(seed)
    drafter = TokenRecyclingDrafter()
    table = drafter.tables.use("")
    table.probabilities = [[rng.random() for _ in range(NUM_SUCCESSORS)] for _ in RANK_PROBABILITIES]
    table.rank_order = [sorted(range(NUM_SUCCESSORS), key=lambda rank: -shares[rank]) for shares in table.probabilities]
    for _ in range(40):
        table.learn(tuple(rng.choices(range(6), k=rng.randrange(1, 4))), tuple(rng.sample(range(6), 3)))
    for start in range(6):
        draft = guess(drafter, [start], 7)
        assert draft.confidence is not None
        paths: list[tuple[int, ...]] = []
        chances: list[float] = []
        for token, parent, share in zip(draft.tokens, draft.parents, draft.confidence, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            chances.append(share * (chances[parent] if parent >= 0 else 1.0))
        wanted = all_paths(table, (start,), 7)
        assert len(set(paths)) == 7, "a token stands once under each parent"
        assert chances == pytest.approx([chance for _, chance in wanted[:7]])
        assert chances == pytest.approx([dict(wanted)[path] for path in paths])
        assert chances == sorted(chances, reverse=True)
        assert guess(drafter, [start], 3) == draft.truncate(3), "a smaller budget gets the beginning"
        few = guess(drafter, [start], 7, floor=chances[3])
        assert len(few) == sum(chance >= chances[3] for chance in chances)


def test_a_node_is_one_whoever_adds_it() -> None:
    def follow(state: int) -> Iterator[tuple[int, float, int]]:
        yield from [(state + 1, 0.5, state + 1), (0, 0.2, 0)]

    tree = BestFirstTree(5, follow)
    probe = tree.add(tree.add(-1, 6), 9)
    tree.fill(Budget(5))
    assert (tree.tokens[:3], tree.parents[:3], probe) == ([6, 9, 7], [-1, 0, 0], 1)
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == 5
    assert tree.confidence[:2] == [0.5, 0.0], "what it is as a guess counts, not that it was there before"


def test_how_likely_successors_are_is_learnt() -> None:
    drafter = TokenRecyclingDrafter()
    for number in range(200):
        step(drafter, sequence(number, [1]), Draft(), (), 6, ((5, 6, 7),))
    draft = guess(drafter, [1], 3)
    assert draft.confidence is not None
    assert draft.tokens[0] == 6 and draft.confidence[0] > 0.9, "what was right comes first, whatever its rank"
    assert max(draft.confidence[1:]) < 0.1
    assert guess(drafter, [1], 8, floor=0.5).tokens == (6,)
    assert drafter.tables.use("").probabilities[1:] == [list(shares) for shares in RANK_PROBABILITIES[1:]]


def test_tenants_do_not_see_each_other() -> None:
    drafter = TokenRecyclingDrafter(tenants=2)
    step(drafter, sequence(0, [1], "a"), Draft(), (), 6, ((6, 7),))
    assert guess(drafter, [1], tenant="b").tokens == ()
    step(drafter, sequence(1, [2], "b"), Draft(), (), 6, ((6, 7),))
    assert guess(drafter, [1], tenant="b").tokens == ()
    assert guess(drafter, [2], tenant="a").tokens == ()
    step(drafter, sequence(2, [1], "a"), Draft(), (), 6, ((6, 7),))
    guess(drafter, [2], tenant="b")
    step(drafter, sequence(3, [3], "c"), Draft(), (), 6, ((6, 7),))
    assert guess(drafter, [2], tenant="b").tokens == (), "the one who wrote longest ago is gone; to ask is not to write"
    assert guess(drafter, [1], tenant="a").tokens


def test_what_was_learnt_first_goes_first() -> None:
    drafter = TokenRecyclingDrafter(max_ngrams=30, tenants=3)
    for token in range(300):
        step(drafter, sequence(token, [token]), Draft(), (), 6, ((6, 7),))
        if token % 10 == 8:
            step(drafter, sequence(token, [5]), Draft(), (), 6, ((6, 7),))
        assert token < 5 or guess(drafter, [5]).tokens, "what is in use stays"
    assert len([token for token in range(300) if guess(drafter, [token]).tokens]) == 30
    for tenant in "abcdef":
        step(drafter, sequence(0, list(range(100)), tenant, prompt=100), Draft(), (), 6, ((6,),))
    assert 0 < drafter.memory <= 3 * 30 * 1000
    nothing = TokenRecyclingDrafter(max_ngrams=0)
    step(nothing, sequence(0, [1]), Draft(), (), 6, ((6, 7),))
    assert (guess(nothing, [1]).tokens, nothing.memory) == ((), 0)


def test_memory_is_told_honestly() -> None:
    rng = random.Random(0)

    def word() -> int:
        return int(2 ** (rng.random() * 13)) + 300

    tracemalloc.start()
    table, context = SuccessorTable(100_000), (1, 2, 3)
    for _ in range(4000):
        context = (*context[1:], word())
        table.learn(context, tuple(word() for _ in range(NUM_SUCCESSORS)))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 1.5 < table.memory < used * 1.5


class History:
    """Random sequences of three tenants, in a drafter that is kept and in a record to replay."""

    def __init__(self, seed: int) -> None:
        self.rng, self.kept = random.Random(seed), self.make()
        self.seqs = [sequence(i, self.words(4), "abc"[i % 3], prompt=4) for i in range(6)]
        self.record: list[StepResult] = []
        self.guessed = 0

    @staticmethod
    def make() -> TokenRecyclingDrafter:
        return TokenRecyclingDrafter(max_ngrams=60, tenants=2)

    def words(self, count: int) -> list[int]:
        return [int(self.rng.paretovariate(1)) % 12 for _ in range(count)]

    def step(self) -> None:
        seq = self.rng.choice(self.seqs)
        (draft,) = self.kept.propose([seq], [Budget(self.rng.randrange(6))])
        path: tuple[int, ...] = ()
        while (nodes := draft.children(path[-1] if path else -1)) and self.rng.random() < 0.6:
            path = (*path, self.rng.choice(nodes))
        top = tuple(tuple(dict.fromkeys(self.words(5))) for _ in range(len(draft) + 1))
        outcome = step(self.kept, seq, draft, path, self.words(1)[0], top if self.rng.random() < 0.9 else ())
        self.record.append(outcome)

    def compare(self) -> None:
        fresh = self.make()
        for outcome in self.record:
            fresh.observe([outcome])
        budgets = [Budget(6)] * len(self.seqs)
        drafts = self.kept.propose(self.seqs, budgets)
        assert drafts == fresh.propose(self.seqs, budgets)
        self.guessed += sum(map(len, drafts))


@pytest.mark.parametrize("seed", range(3))
def test_a_kept_drafter_guesses_as_a_fresh_one(seed: int) -> None:
    history = History(seed)
    for _ in range(60):
        history.step()
        history.compare()
    assert history.guessed > 300
