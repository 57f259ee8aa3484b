"""SuffixDecoding: continuations by frequency, in the sequence and in earlier outputs of its tenant."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from foretell.draft.continuation import RESUME_CONFIDENCE, RESUME_MATCH
from foretell.draft.ngram import LONG_NGRAM, MAX_MATCH, MAX_POSITIONS, SEPARATOR, NGramIndex
from foretell.draft.suffix import SuffixDrafter
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, FinishReason, Request, ScheduledSequence, Sequence, StepResult

BUDGET = Budget(8)


def sequence(number: int, tokens: list[int], tenant: str = "", prompt: int = 0) -> Sequence:
    request = Request(str(number), tuple(tokens[:prompt]), SamplingParams(), 0, 100_000, tenant=tenant)
    return Sequence(number, request, list(tokens))


def draft_for(drafter: SuffixDrafter, tokens: list[int], nodes: int = 8, tenant: str = "") -> Draft:
    seq = sequence(-1, tokens, tenant)
    (draft,) = drafter.propose([seq], [Budget(nodes)])
    drafter.forget(seq)
    return draft


def finish(
    drafter: SuffixDrafter, text: list[int], tenant: str = "", prompt: int = 0, how: FinishReason = "stop"
) -> None:
    seq = sequence(-2, text, tenant, prompt)
    seq.finish_reason = how
    drafter.forget(seq)


def agreeing(text: list[int], position: int, end: int) -> int:
    """Reference: return how many tokens before a position match the end of text[:end]."""
    most = min(MAX_MATCH, position, end)
    return next((n for n in range(most) if text[position - 1 - n] != text[end - 1 - n]), most)


@pytest.mark.parametrize("letters", [1, 2, 3, 6, 20])
def test_every_earlier_position_is_found_with_its_full_match(letters: int) -> None:
    rng = random.Random(letters)
    text: list[int] = []
    known = NGramIndex(text)
    for _ in range(MAX_POSITIONS):
        text += [rng.randrange(letters) for _ in range(rng.choice((1, 1, 3)))]
        known.catch_up()
        end = len(text)
        positions = [position for position in range(end - 1, 0, -1) if agreeing(text, position, end)]
        assert known.after(text[-1]) == positions[:MAX_POSITIONS]
        wanted = [
            (agreeing(text, position, end), position) for position in positions if agreeing(text, position, end) > 1
        ][:MAX_POSITIONS]
        full = next((n for n, (length, _) in enumerate(wanted, 1) if length == MAX_MATCH), len(wanted))
        assert known.matches(text, end) == wanted[:full]


def test_a_reference_is_copied_from_until_the_sequence_has_the_same_match() -> None:
    drafter = SuffixDrafter()
    quoted = Request("0", (1, 2), SamplingParams(), 0, 100, reference=(7, 8, 9, 10, 11, 12))
    for tokens, expected in (([1, 2, 7, 8], (9, 10, 11)), ([1, 2], ()), ([1, 2, 11, 12], ())):
        seq = Sequence(1, quoted, tokens)
        for each in (drafter, SuffixDrafter()):
            assert each.propose([seq], [BUDGET])[0].tokens == expected, "it ends where the reference ends"
        drafter.forget(seq)
    own = Sequence(2, quoted, [7, 8, 3, 4, 5, 7, 8])
    assert drafter.propose([own], [BUDGET])[0].tokens[:2] == (3, 4), "the sequence itself wins ties"
    drafter.prepare([own])
    held = drafter.memory
    drafter.forget(own)
    assert drafter.memory == 0 < held
    assert draft_for(drafter, [1, 2, 7, 8]).tokens == (), "other requests do not see it"


def test_a_long_match_is_found_however_often_its_end_occurred_since() -> None:
    source = list(range(100, 120))
    text = [*source, 7, *[118, 119, 8] * (2 * MAX_POSITIONS), *source]
    known = NGramIndex(text)
    known.catch_up()
    assert known.matches(text, len(text))[-1] == (len(source), len(source))
    assert len(known.matches(text, len(text))) == MAX_POSITIONS + 1
    assert draft_for(SuffixDrafter(), text, 1).tokens == (7,)
    assert len(source) > LONG_NGRAM


def test_the_most_frequent_continuation_wins_then_the_most_recent() -> None:
    often = [1, 2, 3, 7, 1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    draft = draft_for(SuffixDrafter(), often, 1)
    assert draft.tokens == (7,)
    assert draft.confidence == pytest.approx((2 / 3 * 3 / 4,)), "the more, the longer the match"
    assert draft.source == "suffix"
    assert draft_for(SuffixDrafter(), [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1).tokens == (8,)


def test_the_draft_length_follows_the_match_length() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert draft_for(SuffixDrafter(offset=0), [*text, 3]).tokens == (4,)
    assert draft_for(SuffixDrafter(offset=0), [*text, 2, 3]).tokens == (4, 5)
    assert draft_for(SuffixDrafter(factor=2.0, offset=0), [*text, 2, 3]).tokens == (4, 5, 6, 7)
    assert draft_for(SuffixDrafter(), [*text, 2, 3]).tokens == (4, 5, 6), "and one more"
    assert draft_for(SuffixDrafter(), [*text, 1, 2, 3, 4], 3).tokens == (5, 6, 7), "and never longer than the budget"
    assert draft_for(SuffixDrafter(), text).tokens == ()
    assert draft_for(SuffixDrafter(), [*text, 3], 0).tokens == ()


def test_an_unlikely_token_ends_a_draft() -> None:
    text = [token for i in range(5) for token in (1, 2, 3, 10 + i)]
    assert draft_for(SuffixDrafter(offset=9), [*text, 1, 2], 2).tokens == (3, 14)
    assert draft_for(SuffixDrafter(offset=9, min_token_prob=0.3), [*text, 1, 2], 2).tokens == (3,)


def test_a_repetition_continues() -> None:
    assert draft_for(SuffixDrafter(), [4, 5, 6] * 4).tokens == (4, 5, 6, 4, 5, 6, 4, 5)
    assert draft_for(SuffixDrafter(), [7] * 50).tokens == (7,) * 8


def test_a_copy_resumes_after_a_token_that_differs() -> None:
    source = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    copied = source[:RESUME_MATCH]
    draft = draft_for(SuffixDrafter(), [*source, *copied, 99], 2)
    assert draft.tokens == tuple(source[RESUME_MATCH + 1 : RESUME_MATCH + 3])
    assert draft.confidence == pytest.approx((RESUME_CONFIDENCE * RESUME_MATCH / (RESUME_MATCH + 1),) * 2)
    assert draft_for(SuffixDrafter(), [*source, *copied[1:], 99]).tokens == (), "the copy is too short to resume"
    assert draft_for(SuffixDrafter(), [*range(50), *range(45), 99], 3).tokens == (46, 47, 48)
    assert draft_for(SuffixDrafter(), [*source, *source, 99]).tokens == (2, 3, 4, 5, 6, 7, 8, 9)
    assert draft_for(SuffixDrafter(), [9, 9, 50, *source, *copied, 9, 9], 1).tokens == (50,), (
        "a match of the end comes first"
    )


def test_finished_outputs_of_the_same_tenant_are_used() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [90, 91, *range(20)], "a", prompt=2)
    assert draft_for(drafter, [50, 3, 4, 5], tenant="a").tokens == (6, 7, 8, 9)
    assert draft_for(drafter, [50, 3, 4, 5], tenant="b").tokens == ()
    assert draft_for(drafter, [50, 17, 18, 19], tenant="a").tokens == (), "nothing follows the end of an output"
    assert draft_for(drafter, [89, 90], tenant="a").tokens == (), "its prompt is not in the store"


@pytest.mark.parametrize("how", ["abort", "error", None])
def test_an_aborted_output_is_not_stored(how: FinishReason | None) -> None:
    drafter = SuffixDrafter()
    finish(drafter, list(range(20)), how=how)  # type: ignore[arg-type]
    assert draft_for(drafter, [3, 4, 5]).tokens == ()
    assert drafter.memory == 0


def test_the_better_score_wins_and_the_sequence_itself_among_equals() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 30, 31])
    assert draft_for(drafter, [1, 2, 40, 41, 9, 1, 2], 2).tokens == (40, 41)
    assert draft_for(drafter, [2, 40, 9, 1, 2]).tokens == (30, 31), "a longer match in the store"
    drafter = SuffixDrafter()
    finish(drafter, [1, 30, 8, 1, 31])
    assert draft_for(drafter, [1, 40, 7, 1, 41, 9, 1], 1).tokens == (41,), "as likely here as there"


@pytest.mark.parametrize("tokens", [64, 300])
def test_the_store_is_bounded(tokens: int) -> None:
    rng = random.Random(0)
    drafter, most = SuffixDrafter(store_tokens=tokens, tenants=3), 0
    for i in range(2000):
        tenant = f"t{rng.randrange(6)}"
        finish(drafter, [rng.randrange(50) for _ in range(rng.randrange(1, 60))], tenant)
        kept = [sum(map(len, drafter.store.indices(f"t{n}"))) for n in range(6)]
        assert max(kept) <= tokens
        assert sum(map(bool, kept)) <= 3
        most = max(most, drafter.memory)
        assert i > 0 or drafter.memory > 0
    assert most < 3 * tokens * 1000


def test_the_oldest_outputs_and_the_least_recent_tenants_are_evicted_first() -> None:
    drafter = SuffixDrafter(store_tokens=100, tenants=2)
    for i in range(12):
        finish(drafter, list(range(i * 20, i * 20 + 20)), "a")
    known = [bool(draft_for(drafter, [i * 20 + 5, i * 20 + 6], tenant="a").tokens) for i in range(12)]
    assert known == sorted(known) and known[-1] and not known[0]
    finish(drafter, [1, 2, 3, 4], "b")
    drafter.observe([StepResult(ScheduledSequence.of(sequence(0, [1], "a"), 1))])
    finish(drafter, [1, 2, 3, 4], "c")
    assert draft_for(drafter, [226, 227], tenant="a").tokens, "in use"
    assert not draft_for(drafter, [1, 2], tenant="b").tokens
    finish(drafter, [5, 6, 7], "a")
    finish(drafter, [5, 6, 7], "b")
    assert draft_for(drafter, [5, 6], tenant="a").tokens and not draft_for(drafter, [1, 2], tenant="c").tokens


def test_an_output_longer_than_the_store_keeps_its_end() -> None:
    drafter = SuffixDrafter(store_tokens=40)
    finish(drafter, list(range(500)))
    assert draft_for(drafter, [490, 491]).tokens == (492, 493, 494)
    assert draft_for(drafter, [90, 91]).tokens == ()
    for nothing in (SuffixDrafter(store_tokens=0), SuffixDrafter(tenants=0)):
        finish(nothing, list(range(500)))
        assert nothing.memory == 0


def test_the_reported_memory_is_right() -> None:
    rng = random.Random(0)
    text = [int(rng.paretovariate(0.7)) % 5000 for _ in range(20_000)]
    tracemalloc.start()
    known = NGramIndex([*text])
    known.catch_up()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 1.5 < known.memory < used * 1.5


class History:
    """Random sequences of two tenants, in one drafter and in a record to replay."""

    def __init__(self, seed: int) -> None:
        self.rng, self.kept, self.record = random.Random(seed), self.make(), []  # type: ignore[var-annotated]
        self.seqs: list[Sequence] = []
        self.count = self.num_drafted = 0

    @staticmethod
    def make() -> SuffixDrafter:
        return SuffixDrafter(store_tokens=160, tenants=2)

    def step(self) -> None:
        if len(self.seqs) < 4:
            self.count += 1
            self.seqs.append(sequence(self.count, self.words(3), self.rng.choice("abc"), prompt=3))
        seq = self.rng.choice(self.seqs)
        seq.tokens += self.words(self.rng.choice((1, 2, 5, 40)))
        self.tell("observe", [StepResult(ScheduledSequence.of(seq, 1))])
        if self.rng.random() < 0.3:
            seq.finish_reason = self.rng.choice(("stop", "length", "abort"))
            self.seqs.remove(seq)
            self.tell("forget", seq)

    def words(self, count: int) -> list[int]:
        start = self.rng.randrange(30)
        return [(start + i * i) % 7 if self.rng.random() < 0.9 else 8 for i in range(count)]

    def tell(self, method: str, value: object) -> None:
        self.record.append((method, value))
        getattr(self.kept, method)(value)

    def compare(self) -> None:
        fresh = self.make()
        for method, value in self.record:
            getattr(fresh, method)(value)
        asked = self.rng.sample(self.seqs, self.rng.randrange(len(self.seqs) + 1))
        drafts = self.kept.propose(asked, [BUDGET] * len(asked))
        assert drafts == fresh.propose(asked, [BUDGET] * len(asked))
        self.num_drafted += sum(map(len, drafts))


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_with_state_drafts_as_a_fresh_one(seed: int) -> None:
    history = History(seed)
    for _ in range(80):
        history.step()
        history.compare()
    assert history.num_drafted > 200


def test_a_match_longer_than_the_limit_is_the_same_with_and_without_state() -> None:
    kept, fresh = SuffixDrafter(), SuffixDrafter()
    for drafter in (kept, fresh):
        for first, then in ((100, 200), (101, 201), (102, 201)):
            finish(drafter, [first, *range(45), then, then + 1])
    seq = sequence(1, [100], prompt=1)
    for token in range(45):
        seq.tokens.append(token)
        (draft,) = kept.propose([seq], [BUDGET])
        assert draft == draft_for(fresh, seq.tokens)
    assert draft.tokens == (201, 202), "the first token is too far back to count"
    assert draft.confidence == pytest.approx((MAX_MATCH / (MAX_MATCH + 1),) * 2)


def test_a_token_costs_microseconds() -> None:
    rng = random.Random(0)
    corpus = [int(rng.paretovariate(0.7)) % 5000 for _ in range(30_000)]
    drafter = SuffixDrafter(store_tokens=20_000)
    for start in range(0, 30_000, 500):
        finish(drafter, corpus[start : start + 500])
    seq = sequence(0, [*corpus[:4000], *([7] * 4000)], prompt=8000)
    began = time.process_time()
    drafter.propose([seq], [BUDGET])
    read = time.process_time()
    for token in corpus[9000:9500]:
        seq.tokens.append(token)
        drafter.propose([seq], [BUDGET])
    wrote = time.process_time()
    print(f"{(read - began) / 8000 * 1e6:.1f} us a token of the prompt, {(wrote - read) / 500 * 1e6:.1f} us a step")
    assert wrote - began < 8500 * 500e-6


def test_outputs_that_repeat_earlier_ones_take_few_steps() -> None:
    rng = random.Random(0)
    phrases = [[rng.randrange(1000) for _ in range(15)] for _ in range(20)]
    drafter, text = SuffixDrafter(), [token for i in range(20) for token in phrases[i]]
    for _ in range(5):
        finish(drafter, [token for phrase in rng.sample(phrases, 20) for token in phrase])
    seq, steps = sequence(0, [1]), 0
    while len(seq.tokens) <= len(text):
        rest = text[len(seq.tokens) - 1 :]
        draft = drafter.propose([seq], [BUDGET])[0].tokens
        assert SEPARATOR not in draft
        right = next((i for i, token in enumerate(draft) if i >= len(rest) or token != rest[i]), len(draft))
        seq.tokens += rest[: right + 1]
        steps += 1
    assert steps <= 0.5 * len(text)
