"""A request without speculation, or that the controller does not learn from, costs the drafters nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.draft_guard import validate_draft
from foretell.engine.verifier import row_topk
from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, SpeculationChoice, StepResult
from tests.tiny import PROMPTS, VOCAB, World, add, run

OFF = SpeculationChoice(enabled=False)


class TopKDrafter(Drafter):
    """Records what it observes."""

    name = "topk"
    traits = DrafterTraits(top_k=3)

    def __init__(self) -> None:
        self.forgotten: set[str] = set()
        self.num_rows: dict[str, list[int]] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft.chain([1] * budget.nodes, self.name) for budget in budgets]

    def observe(self, results: list[StepResult]) -> None:
        for result in results:
            self.num_rows.setdefault(result.scheduled.seq.request.id, []).append(len(result.top_tokens))

    def forget(self, seq: Sequence) -> None:
        self.forgotten.add(seq.request.id)


def test_a_request_without_speculation_reaches_no_drafter() -> None:
    drafter = TopKDrafter()
    engine = World(budget=2).engine(drafter)
    add(engine, "0", PROMPTS[0], ignore_eos=True)
    add(engine, "1", PROMPTS[1], OFF)
    run(engine)
    assert set(drafter.num_rows) == drafter.forgotten == {"0"}
    assert set(drafter.num_rows["0"]) == {1, 2, 3}, "a row for the root and one for each node"


def test_the_topk_is_computed_only_for_sequences_whose_drafters_use_it() -> None:
    drafter = TopKDrafter()
    engine = World(budget=2).engine(MixDrafter([drafter, NGramDrafter(1, 3)]))
    add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="topk"), ignore_eos=True)
    add(engine, "1", PROMPTS[1], SpeculationChoice(drafter="ngram"), ignore_eos=True)
    run(engine)
    assert set(drafter.num_rows["1"]) == {0}
    assert 0 not in drafter.num_rows["0"]


class SourceDrafter(TopKDrafter):
    """Records which drafter drafted, and whether the top-k was computed."""

    def observe(self, results: list[StepResult]) -> None:
        self.seen = {*getattr(self, "seen", ()), *((each.draft.source, bool(each.top_tokens)) for each in results)}


def test_no_topk_is_computed_for_copied_drafts() -> None:
    drafter = SourceDrafter()
    engine = World(budget=2).engine(MixDrafter([NGramDrafter(1, 3), drafter]))
    add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="ngram,topk"), ignore_eos=True)
    add(engine, "1", PROMPTS[0], SpeculationChoice(drafter="topk"), ignore_eos=True)
    run(engine)
    assert drafter.seen == {("ngram", False), ("topk", True), ("", True)}


class OnlyFirst(FixedController):
    def learns_from(self, seq: Sequence) -> bool:
        return seq.request.id == "0"


def test_drafters_do_not_learn_from_sequences_the_controller_skips() -> None:
    drafter = TopKDrafter()
    engine = World().engine(drafter)
    engine.controller = OnlyFirst(0)
    add(engine, "0", PROMPTS[0])
    add(engine, "1", PROMPTS[1])
    run(engine)
    assert set(drafter.num_rows) == {"0"}


def test_the_topk_is_of_the_last_token_and_the_draft() -> None:
    engine = World().engine(TopKDrafter())
    first, second = (add(engine, str(i), PROMPTS[i])[0].seq for i in range(2))
    scheduled = [ScheduledSequence.of(seq, len(seq.tokens)) for seq in (first, second)]
    logits = torch.rand(4, VOCAB, generator=torch.Generator().manual_seed(0))
    pairs = [(scheduled[0], Draft.chain([5])), (scheduled[1], Draft.chain([6]))]
    found = list(row_topk(pairs, logits, [2, 4], 3, lambda each, draft: each.seq is second))
    assert found == [(), tuple(tuple(row) for row in logits[2:].topk(3).indices.tolist())]
    assert list(row_topk(pairs, logits, [2, 4], 0, lambda each, draft: True)) == [(), ()]


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain([VOCAB]),
        replace(Draft.chain([1]), sampled=(True,)),
        Draft.chain([1, 2], probs=torch.full((1, VOCAB), 1 / VOCAB)),
    ],
    ids=["outside", "sampled without probs", "too few rows"],
)
def test_a_draft_that_cannot_be_verified_is_rejected(draft: Draft) -> None:
    with pytest.raises(ValueError, match="loose"):
        validate_draft(draft, Budget(4, "loose"), VOCAB)


def test_a_draft_is_cut_to_its_budget_and_named_after_its_drafter() -> None:
    assert validate_draft(Draft.chain([1, 2, 3], "other"), Budget(2, "drafter"), VOCAB) == Draft.chain(
        [1, 2], "drafter"
    )
    assert validate_draft(Draft.chain([VOCAB + 1], "other"), Budget(0, "drafter"), VOCAB) == Draft()
