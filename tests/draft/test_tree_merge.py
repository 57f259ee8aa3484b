"""Several drafters' guesses in one tree."""

from __future__ import annotations

import itertools

import pytest
import torch

from foretell import draft as drafters
from foretell.certify.toy import Context, bias, chain, toy_language, tree
from foretell.certify.toy import ToyLanguage as Toy
from foretell.config import SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.mix import MergedDrafter, MixDrafter, merge_drafts
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.stats import SpeculationStats, token_origins
from foretell.sampling_params import SamplingParams
from foretell.types import (
    TARGET,
    Budget,
    Draft,
    Request,
    ScheduledSequence,
    Sequence,
    SpeculationChoice,
    StepResult,
    VerifyResult,
)
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, Rule
from tests.laws.test_losslessness import SAMPLING, WORLDS, oracle, preempt_youngest, truth_for
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, model_drafter, run

LEFT = Draft((1, 2, 3), (-1, 0, 1), "left", confidence=(0.9, 0.5, 0.5))
RIGHT = Draft((1, 4, 5), (-1, 0, -1), "right", confidence=(0.6, 0.9, 0.3))


def test_a_token_stands_once_under_its_parent_and_the_likeliest_come_first() -> None:
    found = merge_drafts([LEFT, RIGHT], 9, "both")
    assert found.tokens == (1, 4, 2, 5, 3) and found.parents == (-1, 0, 0, -1, 2)
    assert found.origins == ("left", "right", "left", "right", "left")
    assert found.confidence == pytest.approx((0.9, 0.6, 0.5, 0.3, 0.5))
    assert merge_drafts([LEFT, RIGHT], 3, "both").tokens == (1, 4, 2)
    assert merge_drafts([LEFT], 9, "both").tokens == LEFT.tokens
    silent = merge_drafts([LEFT, Draft.chain([7, 8], "silent")], 9, "both")
    assert silent.tokens == (1, 7, 2, 8, 3)


def test_the_record_says_whose_guess_stood() -> None:
    found = merge_drafts([LEFT, RIGHT], 9, "both")
    request = Request("0", (1,), SamplingParams(), 0, 9)
    share = ScheduledSequence.of(Sequence(0, request, [1, 2]), 1)
    outcome = StepResult(share, found, VerifyResult((0, 1), 9), new_tokens=(1, 4, 9))
    assert token_origins(outcome) == ("left", "right", TARGET)
    record = SpeculationStats()
    record.observe(outcome, token_origins(outcome))
    counts = {name: (count.drafted, count.accepted) for name, count in record.by_drafter.items()}
    assert counts == {"left": (3, 1), "right": (2, 1)} and (record.drafted, record.accepted) == (5, 2)


@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_behind_drawn_guesses_others_keep_the_law(rule: Rule) -> None:
    """By enumeration of everything that can happen: fixed guesses of another behind a drawn chain, and a drawn tree."""
    for first in (chain(2), tree([[[]], []], False)):

        def make(here: Toy, context: Context, chance: RandomSource, first=first) -> Draft:  # type: ignore[no-untyped-def]
            mine = first(here, context, chance)
            row = here.draft[context]
            fixed = Draft((int(row.argmin()), int(row.argmax()), 0), (-1, -1, 0), "fixed")
            return merge_drafts([fixed, mine], len(mine) + 2, "both", sampled=True)

        for kind in ("random", "zeros"):
            assert bias(toy_language(kind, 3, 4, seed=1), make, rule, 3) < 1e-12


@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_a_draw_that_is_dropped_for_another_breaks_the_law(rule: Rule) -> None:
    """The control: what is merged by likelihood must not be drawn."""

    def make(here: Toy, context: Context, chance: RandomSource) -> Draft:
        mine = chain(1)(here, context, chance)
        fixed = Draft((int(here.draft[context].argmax()),), (-1,), "fixed", confidence=(0.5,))
        assert mine.probs is not None
        sure = float(mine.probs[0, mine.tokens[0]])
        return mine if sure > 0.5 else fixed

    assert bias(toy_language("random", 3, 4, seed=1), make, rule, 3) > 1e-3


def mixed(truth: list[list[int]]) -> MixDrafter:
    seer = oracle(truth, 0.4)
    seer.name = "seer"
    arms: list[Drafter] = [
        NGramDrafter(1, 3),
        TokenRecyclingDrafter(),
        OwnHead(HEADS["eagle"], packed=True),
        model_drafter(seed=5),
        seer,
    ]
    named = {arm.name: arm for arm in arms}
    for names in (("ngram", "recycle"), ("eagle", "seer"), ("eagle", "model", "ngram")):
        arms.append(MergedDrafter("+".join(names), [named[name] for name in names]))
    return MixDrafter(arms)


@pytest.mark.parametrize("world_name", WORLDS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "stop token"])
def test_it_never_changes_the_text(sampling: str, world_name: str) -> None:
    truth, here = truth_for(sampling), WORLDS[world_name]
    for budget, levels in ((6, 0), (12, 4)):
        set_up = World(here.page_size, here.pages, here.max_num_seqs, here.max_step_tokens, here.prefix_cache, budget)
        set_up = World(**{**vars(set_up), "levels": levels})
        assert generate(mixed(truth), set_up, preempt_youngest, **SAMPLING[sampling]) == truth


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_where_guesses_are_drawn_all_is_judged(rule: str) -> None:
    truth = truth_for("sampled")
    engine = World(budget=12, levels=4).engine(mixed(truth))
    tracks = [
        add(
            engine,
            str(i),
            prompt,
            SpeculationChoice(rule=rule, drafter="eagle+seer,eagle+model+ngram"),
            temperature=1.0,
        )[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    run(engine)
    names = set(itertools.chain.from_iterable(track.speculation.by_drafter for track in tracks))
    assert names <= {"eagle", "seer", "ngram"} and "eagle" in names, "of those that draw only one does"


def test_one_that_fails_leaves_it_to_the_others() -> None:
    def fail(seq: Sequence, budget: Budget) -> Draft:
        raise ValueError("planted")

    broken = ScriptedDrafter(fail)
    ngram = NGramDrafter(1, 3)
    mix = MixDrafter([broken, ngram, MergedDrafter("scripted+ngram", [broken, ngram])])
    engine = World().engine()
    (track,) = add(engine, "0", [1, 2, 3, 1, 2])
    (found,) = mix.propose([track.seq], [Budget(3, "scripted+ngram")])
    assert found.tokens == (3, 1, 2) and set(found.origins or ()) == {"ngram"} and mix.supervisor.failures.total() == 1


def test_it_is_named_with_a_plus() -> None:
    config = SpeculationConfig(drafter="suffix+recycle")
    assert drafters.drafter_names(config) == ("suffix", "recycle", "suffix+recycle")
    assert drafters.default_drafters(config) == ("suffix+recycle",)
    both = SpeculationConfig(drafter="suffix+recycle,suffix")
    assert drafters.default_drafters(both) == ("suffix", "suffix+recycle")
    assert drafters.merged_parts("eagle:/a+b/head") == (), "a folder may have one in its name"
    arm = MergedDrafter("suffix+recycle", [SuffixDrafter(), TokenRecyclingDrafter()])
    assert arm.traits.is_free and not arm.traits.samples
    probs = torch.eye(3)[:1]
    alone = merge_drafts([Draft((0,), (-1,), "x", (True,), (1.0,), probs)], 4, "both", sampled=True)
    assert alone.sampled == (True,) and alone.probs is not None
