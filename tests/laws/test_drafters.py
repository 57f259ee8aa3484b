"""The second law: a draft depends only on the tokens and on what was observed, so that no drafter is out of sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from foretell.draft.base import Drafter
from foretell.draft.corpus.drafter import CorpusDrafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.types import Budget, Draft, DrafterTraits, Sequence, StepResult
from tests.draft.corpora import FixedCorpus, random_documents
from tests.draft.tiny_tokenizers import string_translator, token_translator
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run, tree_around

FILES = [*PROMPTS, *random_documents(seed=0)]
LEARNERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NGramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(offset=2, store_tokens=80),
    "corpus": lambda: CorpusDrafter(FixedCorpus(FILES)),
    "mix": lambda: Rotated([NGramDrafter(1, 3), SuffixDrafter(offset=2, store_tokens=80), model_drafter(seed=5)]),
    "model": lambda: model_drafter(seed=5),
    "recycle": TokenRecyclingDrafter,
    "lookahead": LookaheadDrafter,
    "translated tokens": lambda: token_translator(),
    "translated strings": lambda: string_translator(),
    "confident translation": lambda: token_translator(min_confidence=0.05),
    "confident model": lambda: model_drafter(seed=5, min_confidence=0.05),
    "sharp model": lambda: model_drafter(seed=5, draft_temperature="entropy"),
}


class Rotated(MixDrafter):
    """A mix whose drafter is chosen by the length of the sequence, for controllers that name none."""

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        names = list(self.drafters)
        self.free_drafts(seqs[::2], 2)  # fewer nodes than are proposed next: they must not replace the draft
        chosen = [names[len(seq.tokens) % len(names)] for seq in seqs]
        return super().propose(seqs, [replace(b, drafter=name) for b, name in zip(budgets, chosen, strict=True)])


class Compared(Drafter):
    """Alternates with another drafter, and compares the drafts of a used drafter with those of a fresh one."""

    def __init__(self, make: Callable[[], Drafter], truth: list[list[int]]) -> None:
        self.make, self.kept, self.other = make, make(), tree_around(truth)
        self.traits = DrafterTraits(top_k=self.kept.traits.top_k)
        self.seen: list[Callable[[Drafter], None]] = []
        self.turn = self.compared = 0

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self.turn += 1
        if self.turn % 2:  # the sequences move on without asking the drafter under test
            return self.other.propose(seqs, budgets)
        fresh = self.make()
        for happened in self.seen:
            happened(fresh)
        drafts = self.kept.propose(seqs, budgets)
        assert [draft.tokens for draft in drafts] == [draft.tokens for draft in fresh.propose(seqs, budgets)]
        self.compared += sum(len(draft) for draft in drafts)
        return drafts

    def observe(self, results: list[StepResult]) -> None:
        self.seen.append(lambda drafter: drafter.observe(results))
        self.kept.observe(results)

    def forget(self, seq: Sequence) -> None:
        self.seen.append(lambda drafter: drafter.forget(seq))
        self.kept.forget(seq)


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)
def test_a_draft_depends_on_the_tokens_and_what_was_observed(make: Callable[[], Drafter], preempts: bool) -> None:
    truth = generate(temperature=0.5)
    compared = Compared(make, truth)

    def disturb(engine: Engine) -> None:
        if preempts and engine.scheduler.running and compared.turn % 3 == 0:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    assert generate(compared, World(), disturb, temperature=0.5) == truth
    assert compared.compared > 0, "there was something to compare"


def test_a_draft_depends_on_the_tokens_and_on_the_files_as_they_are_now() -> None:
    """Files that change between two steps: a drafter that has seen other versions drafts as a fresh one."""
    truth = generate(temperature=0.5)
    files = FixedCorpus(FILES, random_documents(seed=1), [*truth, *PROMPTS])
    compared = Compared(lambda: CorpusDrafter(files), truth)
    assert generate(compared, World(), lambda engine: files.advance(), temperature=0.5) == truth
    assert compared.compared > 0


@pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)
def test_a_drafter_forgets_finished_sequences(make: Callable[[], Drafter]) -> None:
    drafter = make()
    engine = World().engine(drafter)
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt)
    engine.step()
    engine.step()
    engine.abort("1")
    run(engine)
    drafters = drafter.drafters if isinstance(drafter, MixDrafter) else {"": drafter}
    assert all(not kept for each in drafters.values() for kept in vars(each).values() if isinstance(kept, dict))
    if isinstance(drafter, MixDrafter):
        assert not drafter._free_drafts


def test_ngram_copies_what_followed_the_most_recent_longest_match() -> None:
    drafter = NGramDrafter(1, 3)
    assert _draft(drafter, [1, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2, 3], 3) == (8, 5, 1)
    assert _draft(NGramDrafter(1, 3), [7, 2, 4, 3, 2, 9, 7, 2], 2) == (4, 3), "a longer match beats a later one"
    assert _draft(NGramDrafter(2, 3), [1, 2, 3, 4], 2) == ()
    assert _draft(NGramDrafter(1, 2), [5], 2) == ()


def test_ngram_continues_a_repetition() -> None:
    assert _draft(NGramDrafter(1, 3), [1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def _draft(drafter: Drafter, tokens: list[int], nodes: int) -> tuple[int, ...]:
    engine = World().engine()
    (state,) = add(engine, "0", tokens)
    return drafter.propose([state.seq], [Budget(nodes)])[0].tokens
