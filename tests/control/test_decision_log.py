"""Decision counts and the log message when speculation goes off or on."""

from __future__ import annotations

import logging

import pytest

from foretell.control.controller import FixedController
from foretell.control.decision_log import (
    DRAFTED,
    LATE,
    LOW_ACCEPT,
    NO_COSTS,
    NO_DRAFT,
    NOT_POLLED,
    OUTDONE,
    PAYS,
    SKIPPED,
    DecisionLog,
)
from foretell.control.settings import ControllerSettings
from foretell.draft.scripted import ScriptedDrafter
from foretell.types import Draft
from tests.control.test_adaptive import adaptive_engine, generate_all

NGRAM = ("ngram",)


def poll(decisions: DecisionLog, has_draft: bool, times: int = 1) -> None:
    """Record polls of a sequence with one drafter, none of whose drafts pays."""
    for _ in range(times):
        decisions.record(NGRAM, NGRAM if has_draft else (), True, "", PAYS)


def switched(on: bool = False, without_drafts: int = 0) -> DecisionLog:
    """Return a log that has just switched, after polls of which some found no draft."""
    decisions = DecisionLog(NGRAM)
    decisions.on = on
    poll(decisions, has_draft=True)
    poll(decisions, has_draft=False, times=without_drafts)
    return decisions


@pytest.mark.parametrize(
    ("drafts", "polled", "chosen", "reason", "ngram", "head", "skip_reason"),
    [
        ((), True, "head", PAYS, (SKIPPED, NO_DRAFT), (DRAFTED, PAYS), ""),
        (NGRAM, True, "head", PAYS, (SKIPPED, OUTDONE), (DRAFTED, PAYS), ""),
        (NGRAM, True, "ngram", PAYS, (DRAFTED, PAYS), (SKIPPED, OUTDONE), ""),
        ((), False, "head", PAYS, (SKIPPED, NOT_POLLED), (DRAFTED, PAYS), ""),
        ((), True, "", PAYS, (SKIPPED, NO_DRAFT), (SKIPPED, LOW_ACCEPT), LOW_ACCEPT),
        ((), False, "", PAYS, (SKIPPED, NOT_POLLED), (SKIPPED, LOW_ACCEPT), LOW_ACCEPT),
        (NGRAM, True, "", LATE, (SKIPPED, LATE), (SKIPPED, LATE), LATE),
        ((), True, "", NO_COSTS, (SKIPPED, NO_COSTS), (SKIPPED, NO_COSTS), NO_COSTS),
    ],
)
def test_each_drafter_of_a_sequence_has_a_decision_and_a_reason(
    drafts: tuple[str, ...],
    polled: bool,
    chosen: str,
    reason: str,
    ngram: tuple[str, str],
    head: tuple[str, str],
    skip_reason: str,
) -> None:
    decisions = DecisionLog(NGRAM)
    for _ in range(3):
        assert decisions.record(("ngram", "head"), drafts, polled, chosen, reason) == skip_reason
    assert decisions.counts == {("ngram", *ngram): 3, ("head", *head): 3}


def test_free_drafters_alone_are_skipped_for_want_of_a_poll_or_a_draft() -> None:
    decisions = DecisionLog(NGRAM)
    assert decisions.record(NGRAM, (), False, "", PAYS) == NOT_POLLED
    assert decisions.record(NGRAM, (), True, "", PAYS) == NO_DRAFT
    assert decisions.record((), (), False, "", PAYS) == "", "it has no drafter"


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
    decisions = DecisionLog(NGRAM)
    poll(decisions, has_draft=False, times=6)
    poll(decisions, has_draft=True, times=5)
    decisions.record(("model",), (), False, "model", PAYS)
    for _ in range(50):
        decisions.record(NGRAM, (), False, "", PAYS)  # not polled
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
        generate_all(engine, max_tokens=3)  # the last step of each request has no room for a draft
    decisions = engine.controller.decisions
    assert (decisions.on, decisions.reason, decisions.num_switches) == (True, "", 0) and decisions.counts


def test_a_controller_that_records_nothing_has_an_empty_log_of_its_own() -> None:
    one, other = FixedController(2), FixedController(2)
    assert one.decisions is one.decisions is not other.decisions and not one.decisions.counts
