"""A window of probes, n-grams from them, and the trees that hold both."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Sequence as Values

import pytest

from foretell.draft import lookahead
from foretell.draft.heads.tree import BestFirstTree
from foretell.draft.lookahead import DraftState, JacobiWindow, LookaheadDrafter, NGramPool, TokenPositions
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, StepResult, VerifyResult


def sequence(number: int, tokens: Values[int]) -> Sequence:
    return Sequence(number, Request(str(number), (), SamplingParams(), 0, 100_000), list(tokens))


def step(
    drafter: LookaheadDrafter,
    seq: Sequence,
    draft: Draft,
    chosen: tuple[int, ...],
    top: tuple[tuple[int, ...], ...] = (),
) -> StepResult:
    """Let a sequence grow by what the target chose, as the rule `match` does."""
    own, path, node = chosen or tuple(row[0] for row in top) or (0,) * (len(draft) + 1), [], -1
    while (found := [child for child in draft.children(node) if draft.tokens[child] == own[node + 1]]) and (
        chosen or top
    ):
        node = found[0]
        path.append(node)
    share, kept = ScheduledSequence.of(seq, 1), (*(draft.tokens[node] for node in path), own[node + 1])
    seq.tokens += kept
    outcome = StepResult(share, draft, VerifyResult(tuple(path), kept[-1]), chosen, kept, top_tokens=top)
    drafter.observe([outcome])
    return outcome


def guess(drafter: LookaheadDrafter, seq: Sequence, nodes: int = 8, floor: float = 0.0) -> Draft:
    return drafter.propose([seq], [Budget(nodes, min_probability=floor)])[0]


def ancestors(draft: Draft, node: int) -> list[int]:
    """Tokens from the root to a node, itself included."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, draft.tokens[node])
        node = draft.parents[node]
    return path


def window_of(levels: list[list[int]]) -> JacobiWindow:
    window = JacobiWindow(len(levels[0]), len(levels))
    window.levels = levels
    return window


def planted(window: JacobiWindow) -> Draft:
    tree: BestFirstTree[DraftState] = BestFirstTree(DraftState(0, [], []), lambda state: iter(()))
    for _ in window.add_to_tree(tree):
        pass
    return tree.draft("window")


@pytest.mark.parametrize(("depth", "columns"), [(1, 5), (2, 3), (3, 4), (4, 1)])
def test_a_probe_sees_the_first_level_up_to_its_column_and_its_own_column(depth: int, columns: int) -> None:
    levels = [[100 * level + column for column in range(columns)] for level in range(1, depth + 1)]
    draft = planted(window_of(levels))
    assert sorted(draft.tokens) == sorted(itertools.chain(*levels))
    for level, column in itertools.product(range(depth), range(columns)):
        node = draft.tokens.index(levels[level][column])
        seen = levels[0][: column + 1] + [levels[above][column] for above in range(1, level + 1)]
        assert ancestors(draft, node) == seen
        assert draft.depths()[node] == column + level + 1, "its place behind the text's last token"


def test_equal_tokens_under_one_parent_are_one_node() -> None:
    window = window_of([[7, 7, 8], [7, 9, 9]])
    draft = planted(window)
    assert [ancestors(draft, node) for node in range(len(draft))] == [[7], [7, 7], [7, 7, 9], [7, 7, 8], [7, 7, 8, 9]]
    assert window.last_nodes(draft) == [1, 2, 4], "a column may end in the first level of the next"
    assert window.last_nodes(Draft((7, 7, 1), (-1, 0, 1))) == [1, None, None], "in anybody's draft, as far as it goes"
    assert window.last_nodes(Draft((8, 7, 9), (-1, 0, 1))) == [None, None, None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_window_stays_where_it_belongs(depth: int, seed: int) -> None:
    """The target says 1000 + place whatever is before it: what it said must stand at its place ever after."""
    rng, last, invented = random.Random(seed), 50, 0
    window = JacobiWindow(6, depth)
    window.pad(-1, lambda token, salt: -1)
    for _ in range(40):
        asked = rng.randrange(7) if rng.random() < 0.8 else 0
        behind = last + len(window.levels)  # the place of what follows the first column
        found = [1000 + behind + column + 1 if column < asked else None for column in range(6)]
        grown = rng.choice((1, 1, 2, 4, 9))
        window.advance(found, grown, lambda token, salt: -1)
        last += grown
        window.pad(-1, lambda token, salt: -1)
        assert len(window.levels) <= depth and {len(level) for level in window.levels} == {6}
        for level, tokens in enumerate(window.levels):
            for column, token in enumerate(tokens):
                assert token in (-1, 1000 + last + level + column + 1)
                invented += token == -1
    assert 0 < invented < 40 * 6 * depth


def test_what_a_probe_was_told_is_guessed_when_its_token_comes() -> None:
    drafter, seq = LookaheadDrafter(columns=2), sequence(0, [1, 2, 3])
    step(drafter, seq, Draft((50, 51), (-1, 0)), (4, 60, 61))
    seq.tokens += [8, 50]
    draft = guess(drafter, seq, 2)
    assert draft.tokens[0] == 60
    assert guess(drafter, sequence(1, seq.tokens)).tokens[:1] != (60,), "each text has its own n-grams"
    drafter.forget(seq)
    assert guess(drafter, seq).tokens == ()


def test_n_grams_go_as_far_as_they_were_said() -> None:
    for ngram, wanted in ((2, {(60,)}), (3, {(51, 61), (60,)}), (4, {(51, 52, 62), (51, 61), (60,)})):
        drafter, seq = LookaheadDrafter(ngram, columns=2), sequence(0, [1, 2, 3])
        step(drafter, seq, Draft((50, 51, 52), (-1, 0, 1)), (4, 60, 61, 62))
        assert set(drafter._states[0].pool.after(50)) == wanted


def test_what_the_text_itself_says_is_the_latest() -> None:
    drafter, seq = LookaheadDrafter(), sequence(0, [1])
    step(drafter, seq, Draft((5, 6, 5), (-1, -1, 1)), (5, 70, 71, 72))
    assert drafter._states[0].pool.after(5) == ((70,), (72,))


def test_probes_are_some_of_every_budget_and_none_of_a_small_one() -> None:
    drafter, seq = LookaheadDrafter(), sequence(0, [*range(10, 80), *range(10, 20)])
    step(drafter, seq, Draft(), (20,))
    window = drafter._states[0].window
    assert window is not None
    window.levels = [list(range(500, 512))]
    for nodes in range(1, 40):
        draft = guess(drafter, seq, nodes)
        probes = [token for token in draft.tokens if token >= 500]
        assert len(draft) == nodes
        assert len(probes) == min(12, nodes * 3 // 8)
        assert probes == window.levels[0][: len(probes)]


def test_a_draft_that_is_cut_is_the_draft_for_less() -> None:
    rng = random.Random(0)
    for seed in range(30):
        drafter, seq = LookaheadDrafter(rng.choice((2, 3))), sequence(0, rng.choices(range(9), k=20))
        for _ in range(4):
            draft = guess(drafter, seq, 9)
            step(drafter, seq, draft, tuple(rng.choices(range(9), k=len(draft) + 1)))
        whole = guess(drafter, seq, 16)
        assert len({*zip(whole.parents, whole.tokens, strict=True)}) == len(whole), "no node stands twice"
        for nodes in range(16):
            assert guess(drafter, seq, nodes).tokens == whole.truncate(nodes).tokens, seed


def test_the_longest_match_comes_first_and_goes_on() -> None:
    text = [1, 2, 3, 4, 60, 61, 62, 9, 3, 4, 70, 9, 4, 80, 9, 1, 2, 3, 4]
    draft = guess(LookaheadDrafter(), sequence(0, text), 48)
    assert draft.tokens[:3] == (60, 61, 62)
    assert {draft.tokens[node] for node in draft.children(-1)} == {60, 70, 80}
    assert draft.confidence is not None and draft.confidence[0] == lookahead.COPY_PROBABILITY[4]
    assert guess(LookaheadDrafter(), sequence(0, [4, 5, 6] * 3), 5).tokens == (4, 5, 6, 4, 5)
    assert guess(LookaheadDrafter(), sequence(0, [1, 2, 3]), 5).tokens == ()
    assert len(guess(LookaheadDrafter(), sequence(0, text), 6, floor=0.5)) == 3, "what does not pay is left out"


def test_where_the_target_does_not_tell_nothing_is_probed() -> None:
    drafter, seq = LookaheadDrafter(), sequence(0, [4, 5, 6] * 3)
    step(drafter, seq, Draft((7, 8), (-1, 0)), (), ((4, 1), (20, 1), (21, 1)))
    assert drafter._states[0].pool.after(7) == ((20,),), "its likeliest token will do"
    assert drafter._states[0].window is not None
    step(drafter, seq, Draft(), ())
    assert drafter._states[0].window is None
    seq.tokens += [4, 5, 6]
    draft = guess(drafter, seq)
    assert (draft.tokens[0], len(draft)) == (4, 8), "and the text itself is still there to guess from"


def test_it_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOL_TOKENS", 50)
    rng, drafter, seq = random.Random(0), LookaheadDrafter(per_token=3), sequence(0, [1, 2, 3])
    for _ in range(200):
        draft = guess(drafter, seq)
        step(drafter, seq, draft, tuple(rng.choices(range(90), k=len(draft) + 1)))
    known = drafter._states[0]
    assert sum(bool(known.pool.after(token)) for token in range(90)) == 50
    assert max(len(known.pool.after(token)) for token in range(90)) == 3
    assert max(len(known.positions.after(token)) for token in range(90)) == lookahead.MAX_POSITIONS
    assert drafter.memory > 0
    drafter.forget(seq)
    assert drafter.memory == 0


def test_memory_is_told_honestly() -> None:
    rng = random.Random(0)
    words = [int(2 ** (rng.random() * 13)) + 300 for _ in range(8000)]
    tracemalloc.start()
    text, pool = TokenPositions(), NGramPool(4)
    text.catch_up(words, len(words))
    for i in range(4000):
        pool.push(int(2 ** (rng.random() * 13)) + 300, (int(2 ** (rng.random() * 13)) + 300 + i,))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 1.5 < text.memory + pool.memory < used * 1.5


@pytest.mark.parametrize("ngram", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_a_kept_drafter_guesses_as_a_fresh_one(ngram: int, seed: int) -> None:
    """With drafts of its own, none, and those of others; the fresh one hears of all when the texts have gone on."""
    rng, kept = random.Random(seed), LookaheadDrafter(ngram)
    seqs = [sequence(i, rng.choices(range(9), k=5)) for i in range(3)]
    record: list[StepResult] = []
    guessed = 0
    for _ in range(60):
        seq = rng.choice(seqs)
        draft = guess(kept, seq, rng.choice((0, 1, 6, 12)))
        if rng.random() < 0.3:
            draft = Draft((1, 2, 3), (-1, -1, 0))
        told = tuple(rng.choices(range(9), k=len(draft) + 1)) if rng.random() < 0.95 else ()
        record.append(step(kept, seq, draft, told))
        fresh = LookaheadDrafter(ngram)
        for outcome in record:
            fresh.observe([outcome])
        budgets = [Budget(10)] * len(seqs)
        drafts = kept.propose(seqs, budgets)
        assert drafts == fresh.propose(seqs, budgets)
        guessed += sum(map(len, drafts))
    assert guessed > 1000


def test_an_n_gram_has_two_tokens_at_least() -> None:
    with pytest.raises(ValueError, match="2 or more"):
        LookaheadDrafter(ngram=1)
