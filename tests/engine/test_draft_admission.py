"""A tree that enters holds one row per token under one parent, and to leave out the others changes no law."""

from __future__ import annotations

import pytest
import torch

from foretell.certify.toy import Context, ToyDraftBuilder, bias, toy_language
from foretell.certify.toy import ToyLanguage as Toy
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.draft_guard import admitted, distinct
from foretell.types import Budget, Draft, Sequence
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, Rule
from tests.laws.test_losslessness import truth_for
from tests.tiny import PROMPTS, VOCAB, World, add, run


def test_what_hangs_below_a_guess_made_twice_hangs_below_the_first() -> None:
    twice = Draft((5, 6, 5, 6, 7, 8), (-1, 0, -1, 2, 2, 3), "tree", confidence=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4))
    found = admitted(twice, Budget(9), VOCAB)
    assert (found.tokens, found.parents) == ((5, 6, 7, 8), (-1, 0, 0, 1))
    assert found.confidence == (0.9, 0.8, 0.5, 0.4)
    once = Draft((5, 6, 7), (-1, -1, 0), "tree")
    assert distinct(once) is once


def test_a_draw_keeps_its_row() -> None:
    rows = torch.full((4, 9), 1 / 9)
    found = distinct(Draft((5, 5, 5, 6), (-1, -1, -1, 2), "tree", (True, True, False, False), None, rows))
    assert (found.tokens, found.parents, found.sampled) == ((5, 5, 6), (-1, -1, 0), (True, True, False))
    assert found.probs is not None and len(found.probs) == 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_the_law_is_kept(rule: Rule, seed: int) -> None:
    parents = (-1, -1, -1, 0, 2, 2)
    drawn = (torch.rand(6, generator=torch.Generator().manual_seed(seed)) < 0.6).tolist()
    drawn[2] = False  # now and then it is what was drawn before it
    fewer = 0

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        nonlocal fewer
        sketch = ToyDraftBuilder(here, context)
        for parent, at_random in zip(parents, drawn, strict=True):
            row = here.draft[sketch.context(parent)]
            sketch.add(parent, chance.sample(row) if at_random else int(row.argmax()), row if at_random else None)
        whole = sketch.finish()
        found = distinct(whole)
        fewer += len(found) < len(whole)
        return found

    assert bias(toy_language("random", 2, 7, seed), make, rule, 3) < 1e-12
    assert fewer


def test_both_ends_of_a_fork_can_be_reached() -> None:
    """The right text hangs below the second of two guesses that are the same."""
    truth = truth_for("greedy")

    def propose(seq: Sequence, budget: Budget) -> Draft:
        first, *rest = (*truth[seq.id][seq.num_output_tokens :][:3], 0, 0)
        return Draft((first, (rest[0] + 1) % VOCAB, first, rest[0]), (-1, 0, -1, 2), "tree")

    engine = World(budget=4, levels=2).engine(ScriptedDrafter(propose))
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert all(track.speculation.accepted_per_step > 2 for track in tracks)
