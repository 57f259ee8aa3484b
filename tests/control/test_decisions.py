"""What is said when drafting goes off or on."""

from __future__ import annotations

import logging

import pytest

from foretell.control.decision_log import DRAFTED, LOW_ACCEPT, NO_GUESS, PAYS, SKIPPED, DecisionLog, Situation, in_words
from foretell.control.settings import ControllerSettings
from foretell.draft.scripted import ScriptedDrafter
from foretell.types import Draft
from tests.control.test_adaptive import adapted, write


def test_off_says_why_and_what_would_help() -> None:
    said = in_words({"ngram": (0.21, 0.44)}, Situation(12, samples=True, on=False, shortest=3))
    assert said == (
        "ngram acceptance 0.21 < break-even 0.44 at batch 12; "
        "what would help: a closer draft, shorter drafts, fewer texts at once, a lower temperature"
    )
    alone = in_words({"ngram": (0.21, 0.44)}, Situation(1, on=False))
    assert alone.endswith("at batch 1; what would help: a closer draft")


def test_off_although_guesses_stand_has_another_cause() -> None:
    rates = {"ngram": (0.5, 0.03), "model": (0.1, 0.4)}
    assert "but there is seldom a guess;" in in_words(rates, Situation(1, on=False, seldom=True))
    assert "but looking for guesses takes more than they save;" in in_words(rates, Situation(1, on=False))
    assert in_words(rates, Situation(2)).endswith("break-even 0.40 at batch 2")


def test_seldom_is_counted_for_those_asked() -> None:
    decisions = DecisionLog()
    for reason, count in ((NO_GUESS, 6), (LOW_ACCEPT, 5)):
        for _ in range(count):
            decisions.note("ngram", SKIPPED, reason)
    decisions.note("model", DRAFTED, PAYS)
    assert decisions.seldom_guesses({"ngram"}) and not decisions.seldom_guesses({"model"})
    assert not decisions.seldom_guesses({"ngram", "model"})


def test_a_switch_is_logged_with_its_reason_and_does_not_flap(caplog: pytest.LogCaptureFixture) -> None:
    decisions, reasons = DecisionLog(), iter(["it fell", "it rose"])
    with caplog.at_level(logging.INFO, "foretell"):
        for _ in range(60):
            decisions.step(False, lambda: next(reasons))
        for turn in range(60):  # one step in ten drafts: neither on nor off
            decisions.step(turn % 10 == 0, lambda: next(reasons))
        assert (decisions.on, decisions.switches, decisions.reason) == (False, 1, "it fell")
        for _ in range(60):
            decisions.step(True, lambda: next(reasons))
    assert (decisions.on, decisions.switches) == (True, 2)
    assert caplog.messages == ["drafting is off: it fell", "drafting is on: it rose"]


def test_fixed_lengths_are_never_off() -> None:
    engine = adapted(
        ScriptedDrafter(lambda seq, budget: Draft((1, 2), (-1, 0))), ControllerSettings(fixed=lambda batch: 2)
    )
    for _ in range(20):
        write(engine, max_tokens=2)  # the last step of each has no room for a guess
    assert engine.controller.speculation_state == (True, "") and engine.controller.num_switches == 0
