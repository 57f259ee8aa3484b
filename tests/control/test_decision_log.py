"""Decision counts and the log message when speculation goes off or on."""

from __future__ import annotations

import logging

import pytest

from foretell.control.decision_log import (
    DRAFTED,
    LOW_ACCEPT,
    NO_DRAFT,
    PAYS,
    SKIPPED,
    DecisionLog,
)
from foretell.control.settings import ControllerSettings
from foretell.draft.scripted import ScriptedDrafter
from foretell.types import Draft
from tests.control.test_adaptive import adaptive_engine, generate_all


def switched(on: bool = False, without_drafts: int = 0) -> DecisionLog:
    """Return a log that has just switched, after polls of which some found no draft."""
    decisions = DecisionLog()
    decisions.on = on
    decisions.record("ngram", SKIPPED, LOW_ACCEPT)
    for _ in range(without_drafts):
        decisions.record("ngram", SKIPPED, NO_DRAFT)
    return decisions


def test_the_message_of_a_switch_off_gives_the_reason_and_what_to_try() -> None:
    assert switched().explain({"ngram": (0.21, 0.44)}, 12, 0, False) == (
        "ngram acceptance 0.21 < break-even 0.44 at batch 12; try a more accurate drafter, a smaller batch"
    )
    assert (
        switched()
        .explain({"ngram": (0.21, 0.44)}, 1, 2, True)
        .endswith("try a more accurate drafter, shorter drafts, a lower temperature")
    )


def test_a_switch_off_despite_high_acceptance_has_another_cause() -> None:
    rates = {"ngram": (0.5, 0.03), "model": (0.1, 0.4)}
    assert "but drafts are rare;" in switched(without_drafts=2).explain(rates, 1, 0, False)
    assert "but polling drafters takes longer than their drafts save;" in switched().explain(rates, 1, 0, False)
    assert switched(on=True).explain(rates, 2, 0, False).endswith("break-even 0.40 at batch 2")


def test_rare_drafts_are_counted_for_the_given_drafters() -> None:
    decisions = DecisionLog()
    for reason, count in ((NO_DRAFT, 6), (LOW_ACCEPT, 5)):
        for _ in range(count):
            decisions.record("ngram", SKIPPED, reason)
    decisions.record("model", DRAFTED, PAYS)
    assert decisions.rarely_drafts({"ngram"}) and not decisions.rarely_drafts({"model"})
    assert not decisions.rarely_drafts({"ngram", "model"})


def test_a_switch_is_logged_with_its_reason_and_has_hysteresis(caplog: pytest.LogCaptureFixture) -> None:
    decisions, reasons = DecisionLog(), iter(["it fell", "it rose"])
    with caplog.at_level(logging.INFO, "foretell"):
        for _ in range(60):
            decisions.record_step(False, lambda: next(reasons))
        for step in range(60):  # one step in ten drafts: between the two thresholds
            decisions.record_step(step % 10 == 0, lambda: next(reasons))
        assert (decisions.on, decisions.num_switches, decisions.reason) == (False, 1, "it fell")
        for _ in range(60):
            decisions.record_step(True, lambda: next(reasons))
    assert (decisions.on, decisions.num_switches) == (True, 2)
    assert caplog.messages == ["speculation is off: it fell", "speculation is on: it rose"]


def test_fixed_lengths_are_never_off() -> None:
    engine = adaptive_engine(
        ScriptedDrafter(lambda seq, budget: Draft((1, 2), (-1, 0))), ControllerSettings(fixed_length=lambda batch: 2)
    )
    for _ in range(20):
        generate_all(engine, max_tokens=2)  # the last step of each request has no room for a draft
    assert engine.controller.speculation_state == (True, "") and engine.controller.num_switches == 0
