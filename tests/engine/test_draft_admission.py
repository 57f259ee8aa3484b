"""An admitted draft tree has distinct tokens under each parent; merging duplicates keeps the output distribution."""

from __future__ import annotations

import pytest
import torch

from foretell.certify.toy import Context, ToyDraftBuilder, bias, toy_language
from foretell.certify.toy import ToyLanguage as Toy
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.draft_guard import deduplicate, validate_draft
from foretell.types import Budget, Draft, Sequence
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, Rule
from tests.laws.test_losslessness import truth_for
from tests.tiny import PROMPTS, VOCAB, World, add, run


def test_children_of_a_duplicate_node_move_to_the_first_one() -> None:
    duplicated = Draft((5, 6, 5, 6, 7, 8), (-1, 0, -1, 2, 2, 3), "tree", confidence=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4))
    found = validate_draft(duplicated, Budget(9), VOCAB)
    assert (found.tokens, found.parents) == ((5, 6, 7, 8), (-1, 0, 0, 1))
    assert found.confidence == (0.9, 0.8, 0.5, 0.4)
    unique = Draft((5, 6, 7), (-1, -1, 0), "tree")
    assert deduplicate(unique) is unique


def test_a_sampled_duplicate_keeps_its_row() -> None:
    rows = torch.full((4, 9), 1 / 9)
    found = deduplicate(Draft((5, 5, 5, 6), (-1, -1, -1, 2), "tree", (True, True, False, False), None, rows))
    assert (found.tokens, found.parents, found.sampled) == ((5, 5, 6), (-1, -1, 0), (True, True, False))
    assert found.probs is not None and len(found.probs) == 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_merging_duplicates_keeps_the_output_distribution(rule: Rule, seed: int) -> None:
    parents = (-1, -1, -1, 0, 2, 2)
    sampled = (torch.rand(6, generator=torch.Generator().manual_seed(seed)) < 0.6).tolist()
    sampled[2] = False  # sometimes a duplicate of a sampled node before it
    num_merged = 0

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        nonlocal num_merged
        builder = ToyDraftBuilder(here, context)
        for parent, is_sampled in zip(parents, sampled, strict=True):
            row = here.draft[builder.context(parent)]
            builder.add(parent, chance.sample(row) if is_sampled else int(row.argmax()), row if is_sampled else None)
        full = builder.finish()
        found = deduplicate(full)
        num_merged += len(found) < len(full)
        return found

    assert bias(toy_language("random", 2, 7, seed), make, rule, 3) < 1e-12
    assert num_merged


def test_children_of_both_duplicates_can_be_accepted() -> None:
    """The correct continuation is below the second of two equal draft tokens."""
    truth = truth_for("greedy")

    def propose(seq: Sequence, budget: Budget) -> Draft:
        first, *rest = (*truth[seq.id][seq.num_output_tokens :][:3], 0, 0)
        return Draft((first, (rest[0] + 1) % VOCAB, first, rest[0]), (-1, 0, -1, 2), "tree")

    engine = World(budget=4, levels=2).engine(ScriptedDrafter(propose))
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert all(state.speculation.accepted_per_step > 2 for state in states)
