"""A certificate says lossless only where enough draft tokens were accepted and rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.certify.certificate import Certificate, CertifyJob
from foretell.certify.distribution_test import (
    SETTINGS,
    TREE,
    DraftCheckResult,
    check_distribution,
    check_uniformity,
    tiny_engine,
)
from foretell.certify.evidence import MIN_TOKENS, Evidence, max_near_ties, missing_evidence
from foretell.certify.text_equality import Difference, TextResult
from foretell.cli.main import main

OUTPUTS = TextResult("greedy", 8, 384, drafted=99, accepted=50, steps=200, differences=())


@pytest.fixture(scope="module")
def toy() -> Certificate:
    """A certificate whose toy model has enough evidence."""
    draws = [
        check_distribution(tiny_engine(s.drafter(), draft_length=s.draft_length), "match", s, 300)
        for s in (*SETTINGS, TREE)
    ]
    return Certificate(CertifyJob(), distribution=draws)


def with_outputs(toy: Certificate, *outputs: TextResult) -> Certificate:
    return replace(toy, outputs=list(outputs))


@pytest.mark.parametrize(
    ("drafted", "accepted", "verdict", "reason"),
    [
        (99, 50, "lossless", None),
        (0, 0, "inconclusive", "no token was drafted"),
        (99, 0, "inconclusive", "none of 99 draft tokens was accepted"),
        (99, 99, "inconclusive", "none of 99 draft tokens was rejected"),
        (MIN_TOKENS + 1, MIN_TOKENS, "inconclusive", "10 accepted and 1 rejected draft tokens"),
        (99, MIN_TOKENS - 1, "inconclusive", "9 accepted and 90 rejected draft tokens"),
        (2 * MIN_TOKENS, MIN_TOKENS, "lossless", None),
    ],
)
def test_acceptance_and_rejection_must_both_have_happened(
    toy: Certificate, drafted: int, accepted: int, verdict: str, reason: str | None
) -> None:
    found = with_outputs(toy, replace(OUTPUTS, drafted=drafted, accepted=accepted))
    assert found.verdict == verdict == found.as_json()["verdict"]
    assert (found.lossless is True) is (verdict == "lossless") and found.lossless is not False
    assert [reason is not None and reason in line for line in found.reasons] == [True] * (reason is not None)


def test_a_setting_without_drafts_is_not_made_good_by_another(toy: Certificate) -> None:
    found = with_outputs(toy, OUTPUTS, replace(OUTPUTS, setting="sampled", drafted=0, accepted=0))
    assert found.verdict == "inconclusive" and "sampled" in found.reasons[0]


def test_evidence_of_several_settings_adds_up() -> None:
    assert missing_evidence("part 3", [Evidence("a", 12, 6), Evidence("b", 9, 4)]) == []
    assert len(missing_evidence("part 3", [Evidence("a", 12, 5), Evidence("b", 9, 4)])) == 1
    assert missing_evidence("part 3", []) == []


def test_a_failure_is_not_made_inconclusive_by_missing_evidence(toy: Certificate) -> None:
    wrong = (Difference(0, 3, 1, 2, margin=1.0, bound=0.0),)
    found = with_outputs(toy, replace(OUTPUTS, drafted=0, accepted=0, differences=wrong))
    assert found.verdict == "not lossless" and found.lossless is False


def test_a_draft_check_needs_enough_sampled_tokens(toy: Certificate) -> None:
    assert (
        check_uniformity([]).missing_evidence
        and DraftCheckResult(99, 0.5).missing_evidence
        and not DraftCheckResult(100, 0.5).missing_evidence
    )
    found = replace(with_outputs(toy, OUTPUTS), draft_checks=[check_uniformity([])])
    assert found.verdict == "inconclusive"


def test_parts_that_were_not_run_are_no_evidence(toy: Certificate) -> None:
    assert toy.lossless is None and Certificate(CertifyJob()).lossless is None


def near_ties(count: int) -> tuple[Difference, ...]:
    return tuple(Difference(i, 3, 1, 2, margin=0.85, bound=0.9) for i in range(count))


@pytest.mark.parametrize(
    ("count", "control", "verdict"),
    [(8, 0, "inconclusive"), (6, 0, "inconclusive"), (5, 0, "lossless"), (8, 3, "lossless"), (8, 8, "lossless")],
)
def test_near_ties_are_excused_up_to_what_plain_batches_explain(
    toy: Certificate, count: int, control: int, verdict: str
) -> None:
    found = with_outputs(toy, replace(OUTPUTS, differences=near_ties(count), control=control))
    assert found.verdict == verdict
    assert not found.reasons or "differ at near-ties" in found.reasons[0]


def test_the_limit_of_near_ties_follows_the_control() -> None:
    assert [max_near_ties(60, control) for control in (0, 5, 60)] == [6, 15, 60]
    assert max_near_ties(1, 0) == 1, "one sequence proves nothing"


def test_settings_of_the_distribution_test_share_no_seeds() -> None:
    starts = sorted(setting.first_seed for setting in (*SETTINGS, TREE))
    assert all(after - before >= 240_000 for before, after in zip(starts, starts[1:], strict=False))


def test_settings_under_match_are_independent_evidence(toy: Certificate) -> None:
    assert len({result.p_value for result in toy.distribution}) == len(toy.distribution)


def test_without_a_drafter_the_command_is_inconclusive(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.certify.certificate.QUICK_SAMPLES", 300)
    monkeypatch.setattr("foretell.certify.certificate.KNOWN_BUG_SAMPLES", 1500)
    words = ["certify", "--model", str(tiny_folder), "--drafter", "none", "--quick", "--max-tokens", "4", "--json"]
    assert main(words) == 4
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["lossless"] is None and report["verdict"] == "inconclusive" and len(report["reasons"]) == 2
    assert [each["drafted"] for each in report["texts"]] == [0, 0]
    assert "0 drafted, 0 accepted, 0 rejected" in err and "verdict: inconclusive: part 3, greedy" in err
