"""Several drafters behind one."""

from __future__ import annotations

import pytest

from foretell.draft.base import Drafter
from foretell.draft.mix import CONFIDENT, MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.supervisor import TOLERATED, Supervisor
from foretell.types import Budget, Draft, DrafterTraits, Sequence, SpeculationChoice, StepResult
from tests.tiny import PROMPTS, World, add, generate, run


class Broken(Drafter):
    """Fails wherever it is told to."""

    name = "broken"
    traits = DrafterTraits(is_free=True)

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _call(self, name: str) -> None:
        self.calls += name == self.where
        if name == self.where:
            raise ValueError("planted")

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self._call("propose")
        return [Draft.chain([1] * budget.nodes, self.name) for budget in budgets]

    def observe(self, outcomes: list[StepResult]) -> None:
        self._call("observe")

    def forget(self, seq: Sequence) -> None:
        self._call("forget")


@pytest.mark.parametrize("where", ["propose", "observe", "forget"])
def test_an_arm_that_fails_costs_its_own_guesses_and_nobody_elses(where: str) -> None:
    truth = generate()
    broken = Broken(where)
    engine = World().engine(MixDrafter([NGramDrafter(1, 3), broken], supervisor=Supervisor(lambda: 0.0)))
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    while engine.busy:
        engine.step()
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert engine.stats.speculation.by_drafter["ngram"].drafted > 0
    assert engine.stats.drafter_failures == broken.calls
    assert broken.calls == len(PROMPTS) if where == "forget" else broken.calls == TOLERATED + 1
    assert engine.runner.pool.num_held == 0


def test_a_lone_drafter_that_fails_to_forget_costs_nothing_else() -> None:
    engine = World().engine(Broken("forget"))
    add(engine, "0", PROMPTS[0])
    while engine.busy:
        engine.step()
    assert engine.stats.drafter_failures == 1
    assert engine.runner.pool.num_held == 0
    assert not engine.abort("0")


def test_guesses_that_were_shown_are_not_made_twice_and_never_for_another_text() -> None:
    asked: list[tuple[int, int]] = []

    def guess(seq: Sequence, budget: Budget) -> Draft:
        asked.append((len(seq.tokens), budget.nodes))
        return Draft.chain([7] * budget.nodes, "scripted")

    scripted = ScriptedDrafter(guess)
    scripted.traits, scripted.name = DrafterTraits(is_free=True), "scripted"
    mix = MixDrafter([scripted])
    engine = World().engine(mix)
    (track,) = add(engine, "0", PROMPTS[0])
    seq = track.seq
    assert len(mix.free_drafts([seq], 4)[0]["scripted"]) == 4
    assert len(mix.propose([seq], [Budget(3, "scripted")])[0]) == 3
    assert len(asked) == 1
    assert len(mix.propose([seq], [Budget(6, "scripted")])[0]) == 6
    seq.tokens.append(9)
    mix.propose([seq], [Budget(2, "scripted")])
    assert asked == [(3, 4), (3, 6), (4, 2)]


class Saying(Drafter):
    """Guesses one token and says how sure it is."""

    def __init__(self, name: str, confidence: float, defers: bool = False) -> None:
        self.name, self.confidence = name, confidence
        self.traits = DrafterTraits(is_free=True, defers_to_confident=defers)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft((5,), (-1,), self.name, confidence=(self.confidence,)) for _ in seqs]


@pytest.mark.parametrize(
    ("sure", "shown"),
    [(CONFIDENT, {"copy"}), (1.0, {"copy"}), (CONFIDENT - 0.01, {"copy", "modest"}), (0.0, {"copy", "modest"})],
)
def test_who_stands_back_is_not_asked_where_another_is_sure(sure: float, shown: set[str]) -> None:
    engine = World().engine(MixDrafter([Saying("modest", 0.99, True), Saying("copy", sure)]))
    both = add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="modest,copy"))[0].seq
    alone = add(engine, "1", PROMPTS[1], SpeculationChoice(drafter="modest"))[0].seq
    first, second = engine.drafter.free_drafts([both, alone], 4)
    assert set(first) == shown
    assert set(second) == {"modest"}, "nobody else may guess there"


def test_guesses_drawn_at_random_are_not_shown() -> None:
    """To choose a length with them in sight would be a bias."""

    class Drawn(Drafter):
        name, traits = "drawn", DrafterTraits(is_free=True, samples=True)

        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            return [Draft((1,), (-1,), "drawn", (True,))] * len(seqs)

    engine = World().engine(MixDrafter([Drawn()]))
    (track,) = add(engine, "0", PROMPTS[0])
    assert engine.drafter.free_drafts([track.seq], 2) == [{}]
    run(World().engine())
