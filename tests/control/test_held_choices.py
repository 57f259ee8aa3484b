"""A choice stands for some steps, because choosing takes host time."""

from __future__ import annotations

from typing import Any

from foretell.control.adaptive import AdaptiveController
from foretell.types import Budget, DrafterTraits
from tests.control.test_adaptive import DRAFTS, FREE, HEAD, Clock


def choosing_steps(controller: AdaptiveController) -> list[int]:
    """Return a list to which each step is added in which the controller does not reuse a choice."""
    adapt, found = controller._adapt, list[int]()

    def recorded(*arguments: Any) -> dict[int, Budget]:
        found.append(controller.step)
        return adapt(*arguments)

    controller._adapt = recorded  # type: ignore[method-assign,assignment]
    return found


def test_a_choice_stands_for_some_steps_while_no_free_drafter_has_a_draft() -> None:
    clock = Clock({**FREE, **HEAD})
    seq, steps = clock.sequence(100_000), choosing_steps(clock.controller)
    for _ in range(600):
        clock.step([seq], {}, 0.001, accepted=2)
    steps.clear()
    budgets = [clock.step([seq], {}, 0.001, accepted=2)[0] for _ in range(100)]
    assert 0 < len(steps) <= 25
    assert sum(budget.drafter == "head" and budget.nodes > 0 for budget in budgets) == 100
    clock.step([seq, clock.sequence(100_000)], {}, 0.001, accepted=2)
    assert steps[-1] == clock.controller.step, "a sequence came"
    steps.clear()
    fresh = clock.sequence(100_000)
    for _ in range(10):
        clock.step([fresh], DRAFTS, 0.001, accepted=4)
    assert len(steps) == 10, "a free draft is compared at once"


def test_a_choice_that_stands_leaves_room_for_the_last_token() -> None:
    clock = Clock(HEAD)
    for _ in range(30):
        seq = clock.sequence(60)
        while seq.remaining_tokens > 0:
            remaining = seq.remaining_tokens
            assert clock.step([seq], {}, 0.001, accepted=2)[0].depth < remaining
    assert clock.controller.decisions.counts["head", "drafted", "pays"] > 60


def test_a_choice_not_to_draft_stands_longer() -> None:
    clock = Clock(HEAD)
    seq, steps, tuning = clock.sequence(100_000), choosing_steps(clock.controller), clock.controller.tuning
    budgets = [clock.step([seq], {}, 0.004, accepted=0)[0] for _ in range(1500)]
    drafted = [step for step, budget in enumerate(budgets, 1) if budget.nodes and not budget.is_exploration]
    after = [step for step in steps if step > max(drafted)]
    gaps = [later - before for before, later in zip(after, after[1:], strict=False)]
    assert gaps[0] == max(gaps) == tuning.plain_hold_steps + 1 > tuning.hold_steps + 1
    assert len([step for step in steps if step > 1000]) < 500 / 8


def test_an_optimistic_choice_does_not_stand_before_its_drafter_is_known() -> None:
    """Each of its first drafts tells much: one that is never accepted must not be held."""
    clock = Clock({"head": DrafterTraits(relative_cost=0.05)})
    seqs = [clock.sequence(10_000) for _ in range(8)]
    drafted = [sum(budget.nodes for budget in clock.step(seqs, {}, 0.001, accepted=0)) for _ in range(40)]
    assert sum(drafted) <= 110


def test_a_choice_stands_while_another_drafter_is_unavailable() -> None:
    class Loader:
        unavailable = frozenset({"other"})

        def request_load(self, name: str) -> None: ...

    clock = Clock({"head": DrafterTraits(relative_cost=0.05), "other": DrafterTraits(prior_acceptance=0.1)})
    clock.controller.loader = Loader()
    seq, steps = clock.sequence(10_000), choosing_steps(clock.controller)
    for _ in range(200):
        clock.step([seq], {}, 0.001, accepted=2)
    assert len([step for step in steps if step > 100]) <= 40
