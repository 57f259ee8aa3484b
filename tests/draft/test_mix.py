"""`MixDrafter`: isolation of failures, free drafts, and their reuse."""

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
    """A drafter that fails in one method."""

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

    def observe(self, results: list[StepResult]) -> None:
        self._call("observe")

    def forget(self, seq: Sequence) -> None:
        self._call("forget")


@pytest.mark.parametrize("where", ["propose", "observe", "forget"])
def test_a_failing_drafter_costs_its_own_drafts_only(where: str) -> None:
    truth = generate()
    broken = Broken(where)
    engine = World().engine(MixDrafter([NGramDrafter(1, 3), broken], supervisor=Supervisor(lambda: 0.0)))
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt)]
    while engine.busy:
        engine.step()
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert engine.stats.speculation.by_drafter["ngram"].drafted > 0
    assert engine.stats.drafter_failures == broken.calls
    assert broken.calls == len(PROMPTS) if where == "forget" else broken.calls == TOLERATED + 1
    assert engine.runner.pool.num_held == 0


def test_a_single_drafter_that_fails_to_forget_costs_nothing_else() -> None:
    engine = World().engine(Broken("forget"))
    add(engine, "0", PROMPTS[0])
    while engine.busy:
        engine.step()
    assert engine.stats.drafter_failures == 1
    assert engine.runner.pool.num_held == 0
    assert not engine.abort("0")


def test_free_drafts_are_reused_for_the_same_length_only() -> None:
    asked: list[tuple[int, int]] = []

    def draft_for(seq: Sequence, budget: Budget) -> Draft:
        asked.append((len(seq.tokens), budget.nodes))
        return Draft.chain([7] * budget.nodes, "scripted")

    scripted = ScriptedDrafter(draft_for)
    scripted.traits, scripted.name = DrafterTraits(is_free=True), "scripted"
    mix = MixDrafter([scripted])
    engine = World().engine(mix)
    (state,) = add(engine, "0", PROMPTS[0])
    seq = state.seq
    assert len(mix.free_drafts([seq], 4)[0]["scripted"]) == 4
    assert len(mix.propose([seq], [Budget(3, "scripted")])[0]) == 3
    assert len(asked) == 1
    assert len(mix.propose([seq], [Budget(6, "scripted")])[0]) == 6
    seq.tokens.append(9)
    mix.propose([seq], [Budget(2, "scripted")])
    assert asked == [(3, 4), (3, 6), (4, 2)]


class Saying(Drafter):
    """A drafter of one token with a given confidence."""

    def __init__(self, name: str, confidence: float, defers: bool = False) -> None:
        self.name, self.confidence = name, confidence
        self.traits = DrafterTraits(is_free=True, defers_to_confident=defers)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft((5,), (-1,), self.name, confidence=(self.confidence,)) for _ in seqs]


@pytest.mark.parametrize(
    (("confidence", "offered")),
    [(CONFIDENT, {"copy"}), (1.0, {"copy"}), (CONFIDENT - 0.01, {"copy", "modest"}), (0.0, {"copy", "modest"})],
)
def test_a_deferring_drafter_is_not_asked_where_another_is_confident(confidence: float, offered: set[str]) -> None:
    engine = World().engine(MixDrafter([Saying("modest", 0.99, True), Saying("copy", confidence)]))
    both = add(engine, "0", PROMPTS[0], SpeculationChoice(drafter="modest,copy"))[0].seq
    alone = add(engine, "1", PROMPTS[1], SpeculationChoice(drafter="modest"))[0].seq
    first, second = engine.drafter.free_drafts([both, alone], 4)
    assert set(first) == offered
    assert set(second) == {"modest"}, "it is the only drafter of that request"


def test_sampled_drafts_are_not_free_drafts() -> None:
    """A draft length chosen with them in sight would bias the output."""

    class Drawn(Drafter):
        name, traits = "sampled", DrafterTraits(is_free=True, samples=True)

        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            return [Draft((1,), (-1,), "sampled", (True,))] * len(seqs)

    engine = World().engine(MixDrafter([Drawn()]))
    (state,) = add(engine, "0", PROMPTS[0])
    assert engine.drafter.free_drafts([state.seq], 2) == [{}]
    run(World().engine())
