"""A text that nobody may guess for, or nobody looks at, costs the drafters nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.draft_guard import admitted
from foretell.engine.verifier import row_topk
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, SpeculationChoice, StepResult
from tests.tiny import PROMPTS, VOCAB, World, add, run

OFF = SpeculationChoice(enabled=False)


class Curious(Drafter):
    """Writes down what it is told."""

    name = "curious"
    top_k = 3

    def __init__(self) -> None:
        self.met: set[str] = set()
        self.tops: dict[str, list[int]] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft.chain([1] * budget.nodes, self.name) for budget in budgets]

    def observe(self, outcomes: list[StepResult]) -> None:
        for outcome in outcomes:
            self.tops.setdefault(outcome.scheduled.seq.request.id, []).append(len(outcome.top_tokens))

    def forget(self, seq: Sequence) -> None:
        self.met.add(seq.request.id)


def test_a_request_that_wants_no_guesses_is_shown_to_no_drafter() -> None:
    drafter = Curious()
    engine = World(budget=2).engine(drafter)
    add(engine, "0", PROMPTS[0], ignore_eos=True)
    add(engine, "1", PROMPTS[1], OFF)
    run(engine)
    assert set(drafter.tops) == drafter.met == {"0"}
    assert set(drafter.tops["0"]) == {1, 2, 3}, "a row for the root and one for each node"


def test_only_those_who_may_use_it_pay_for_the_likeliest_tokens() -> None:
    drafter = Curious()
    engine = World(budget=2).engine(MixDrafter([drafter, NGramDrafter(1, 3)]))
    add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="curious"), ignore_eos=True)
    add(engine, "1", PROMPTS[1], SpeculationChoice(drafter="ngram"), ignore_eos=True)
    run(engine)
    assert set(drafter.tops["1"]) == {0}
    assert 0 not in drafter.tops["0"]


class Noting(Curious):
    """Writes down who guessed, and whether it was told the row_topk tokens."""

    def observe(self, outcomes: list[StepResult]) -> None:
        self.seen = {*getattr(self, "seen", ()), *((each.draft.source, bool(each.top_tokens)) for each in outcomes)}


def test_a_text_that_is_copied_costs_nobody_the_likeliest_tokens() -> None:
    drafter = Noting()
    engine = World(budget=2).engine(MixDrafter([NGramDrafter(1, 3), drafter]))
    add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="ngram,curious"), ignore_eos=True)
    add(engine, "1", PROMPTS[0], SpeculationChoice(drafter="curious"), ignore_eos=True)
    run(engine)
    assert drafter.seen == {("ngram", False), ("curious", True), ("", True)}


class Drowsy(FixedController):
    def learns_from(self, seq: Sequence) -> bool:
        return seq.request.id == "0"


def test_whom_the_controller_does_not_watch_nobody_learns_from() -> None:
    drafter = Curious()
    engine = World().engine(drafter)
    engine.controller = Drowsy(0)
    add(engine, "0", PROMPTS[0])
    add(engine, "1", PROMPTS[1])
    run(engine)
    assert set(drafter.tops) == {"0"}


def test_the_likeliest_tokens_are_those_of_the_rows_at_a_texts_end() -> None:
    engine = World().engine(Curious())
    first, second = (add(engine, str(i), PROMPTS[i])[0].seq for i in range(2))
    shares = [ScheduledSequence.of(seq, len(seq.tokens)) for seq in (first, second)]
    logits = torch.rand(4, VOCAB, generator=torch.Generator().manual_seed(0))
    pairs = [(shares[0], Draft.chain([5])), (shares[1], Draft.chain([6]))]
    found = list(row_topk(pairs, logits, [2, 4], 3, lambda share, draft: share.seq is second))
    assert found == [(), tuple(tuple(row) for row in logits[2:].topk(3).indices.tolist())]
    assert list(row_topk(pairs, logits, [2, 4], 0, lambda share, draft: True)) == [(), ()]


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain([VOCAB]),
        replace(Draft.chain([1]), sampled=(True,)),
        Draft.chain([1, 2], probs=torch.full((1, VOCAB), 1 / VOCAB)),
    ],
    ids=["outside", "drawn from nothing", "too few rows"],
)
def test_a_draft_that_cannot_be_checked_is_not_let_in(draft: Draft) -> None:
    with pytest.raises(ValueError, match="loose"):
        admitted(draft, Budget(4, "loose"), VOCAB)


def test_a_draft_is_cut_to_its_budget_and_goes_by_its_arms_name() -> None:
    assert admitted(Draft.chain([1, 2, 3], "other"), Budget(2, "arm"), VOCAB) == Draft.chain([1, 2], "arm")
    assert admitted(Draft.chain([VOCAB + 1], "other"), Budget(0, "arm"), VOCAB) == Draft()
