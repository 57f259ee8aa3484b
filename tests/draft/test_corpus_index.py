"""The index of a large text: the longest matches, as their definition finds them one position at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foretell.draft.corpus.context_index import MAX_CANDIDATES, MAX_STALE, MIN_MATCH, ContextArrays
from foretell.draft.ngram import MAX_MATCH, SEPARATOR
from tests.draft.corpora import FixedCorpus, draft_of, index_of


def common(text: list[int], position: int, tail: list[int]) -> int:
    """Reference: return how many tokens before a position match the end of a tail."""
    most = min(MAX_MATCH, position, len(tail))
    return next((n for n in range(most) if text[position - 1 - n] != tail[-1 - n]), most)


@pytest.mark.parametrize("letters", [1, 2, 4, 20, 200_000])
def test_the_positions_with_the_longest_matches_are_found(letters: int) -> None:
    rng = random.Random(letters)
    for _ in range(20):
        documents = [[rng.randrange(letters) for _ in range(rng.randrange(80))] for _ in range(rng.randrange(1, 8))]
        index = index_of(documents)
        text = list(index.tokens)
        assert text == [token for each in documents for token in (*each, SEPARATOR)]
        for _ in range(20):
            source = rng.choice(documents)
            begin = rng.randrange(len(source) + 1)
            tail = [rng.randrange(letters), *source[begin : begin + rng.randrange(60)]]
            found = index.matches(tail, len(tail))
            lengths = sorted((common(text, position, tail) for position in range(1, len(text) + 1)), reverse=True)
            assert [length for length, _ in found] == [n for n in lengths if n >= MIN_MATCH][:MAX_CANDIDATES]
            assert all(common(text, position, tail) == length for length, position in found)
            assert len({position for _, position in found}) == len(found)


def test_positions_of_stale_texts_are_passed_over() -> None:
    documents = [[1, 2, 3, number] for number in range(10, 17)]
    index = index_of(documents, stale=frozenset({0, 3, 6}))
    found = [index.tokens[position] for _, position in index.matches([1, 2, 3], 3)]
    assert sorted(found) == [11, 12, 14, 15]
    many = index_of([[1, 2, 3]] * (3 * MAX_STALE) + [[1, 2, 4]], stale=frozenset(range(3 * MAX_STALE)))
    assert many.matches([1, 2], 2) == [], "a search among many stale positions ends"


def test_an_empty_index_and_short_sequences_have_no_match() -> None:
    for documents in ([], [[]], [[1]], [[1, 2, 3]]):
        index = index_of(documents)
        assert index.matches([], 0) == index.matches([7], 1) == index.matches([1], 1) == []


def test_a_lookup_reads_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    index = index_of([[rng.randrange(3) for _ in range(50_000)]])
    count = 0
    context = index._context

    def counting(position: int) -> bytes:
        nonlocal count
        count += 1
        return context(position)

    monkeypatch.setattr(index, "_context", counting)
    index.matches([rng.randrange(3) for _ in range(40)], 40)
    assert count <= np.log2(50_000) + 2 + MAX_CANDIDATES + 1


def test_arrays_that_would_be_read_outside_are_refused() -> None:
    good = ContextArrays.build([np.arange(5, dtype=np.int32)])
    good.check()
    for wrong in (
        ContextArrays(good.tokens, good.contexts[:-4], good.order),
        ContextArrays(good.tokens, good.contexts, good.order[:-1]),
        ContextArrays(good.tokens, good.contexts, good.order + 1),
        ContextArrays(good.tokens, good.contexts, good.order - 1),
        ContextArrays(good.tokens - 1, good.contexts, good.order),
    ):
        with pytest.raises(ValueError):
            wrong.check()


def test_a_longer_match_drafts_further_and_ends_with_its_text() -> None:
    corpus = FixedCorpus([list(range(100, 130)), [1, 2, 3]])
    assert draft_of(corpus, [102, 103]).tokens == (104, 105, 106)
    assert draft_of(corpus, list(range(100, 110)), 16).tokens == tuple(range(110, 121))
    assert draft_of(corpus, [128, 129]).tokens == draft_of(corpus, [2, 3]).tokens == ()
    assert draft_of(corpus, [129, 1]).tokens == (), "documents do not run together"
    assert draft_of(FixedCorpus([[1, 2], [5, 1, 2], [1, 2, 3]]), [1, 2]).tokens == (), "more often nothing follows"
    assert draft_of(corpus, [102, 103], 0).tokens == ()
    draft = draft_of(corpus, [102, 103], 1)
    assert draft.source == "corpus" and draft.confidence == pytest.approx((2 / 3,))


def test_the_more_frequent_continuation_is_drafted() -> None:
    corpus = FixedCorpus([[1, 2, 7], [1, 2, 8], [1, 2, 8], [5, 1, 2, 9]])
    assert draft_of(corpus, [1, 2], 1).tokens == (8,)
    assert draft_of(corpus, [5, 1, 2], 1).tokens == (9,), "unless a longer match differs"


def test_a_copy_of_a_file_resumes_after_a_token_that_differs() -> None:
    corpus = FixedCorpus([list(range(100, 130))])
    assert draft_of(corpus, [*range(100, 110), 7], 3).tokens == (111, 112, 113)
    assert draft_of(corpus, [*range(100, 104), 7], 3).tokens == (), "the copy is too short"
    assert draft_of(corpus, [*range(110, 130), 7], 3).tokens == (), "the file has ended"
