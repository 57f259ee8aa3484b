"""Drafters that guess in trees, in a whole engine: the same text, every rule, and steps that are saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foretell.draft.base import Drafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.types import SpeculationChoice
from tests.tiny import PROMPTS, World, add, generate, run

TREES: dict[str, Callable[[], Drafter]] = {
    "recycle": TokenRecyclingDrafter,
    "lookahead": LookaheadDrafter,
    "lookahead of pairs": lambda: LookaheadDrafter(2),
}
WORLDS = [
    World(budget=1),
    World(budget=2),
    World(budget=8),
    World(pages=14, budget=5),
    World(max_num_seqs=1, budget=12),
]
trees = pytest.mark.parametrize("name", TREES)


def preempt_some(engine: Engine) -> None:
    if len(engine.scheduler.running) > 1 and engine.stats.forwards % 3 == 0:
        engine.scheduler.preempt(engine.scheduler.running[-1])


@trees
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_same(temperature: float, name: str) -> None:
    plain = generate(MixDrafter([]), temperature=temperature)
    for world in WORLDS:
        assert generate(TREES[name](), world, preempt_some, temperature=temperature) == plain


@trees
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_every_rule_can_judge_it(rule: str, name: str) -> None:
    engine = World().engine(TREES[name]())
    tracks = [
        track
        for i, prompt in enumerate(PROMPTS)
        for track in add(engine, str(i), prompt, SpeculationChoice(rule=rule), temperature=0.5)
    ]
    run(engine)
    assert sum(track.speculation.drafted for track in tracks) > 100
    assert sum(track.speculation.accepted for track in tracks) > 0


@pytest.mark.parametrize("name", ["recycle", "lookahead"])
def test_what_repeats_itself_takes_few_steps(name: str) -> None:
    engine = World(budget=8).engine(TREES[name]())
    (again,), (never,) = (add(engine, name, prompt, max_tokens=100) for name, prompt in (("0", [1, 2, 3]), ("1", [9])))
    run(engine)
    assert again.speculation.accepted_per_step > 4
    assert never.speculation.accepted_per_step > 1.1
