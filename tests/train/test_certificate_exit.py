"""The exit code of a training run is that of its certificate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.certify.certificate import Certificate, CertifyJob
from foretell.certify.distribution_test import DistributionResult
from foretell.certify.text_equality import Difference, TextResult
from foretell.cli.train import finish
from foretell.train.measure import MeasuredAcceptance
from foretell.train.run import RUN_FILE

DISTRIBUTION = DistributionResult("toy", 300, 60.0, 63, 0.5, 2e-4, 0.05, 0.077, 0.5, 200, 100)
WRONG = (Difference(0, 3, 1, 2, margin=1.0, bound=0.0),)


def outputs(drafted: int, accepted: int, differences: tuple[Difference, ...] = ()) -> TextResult:
    return TextResult("greedy", 8, 384, drafted, accepted, 200, differences)


@pytest.mark.parametrize(
    ("result", "code", "lossless", "line"),
    [
        (outputs(99, 50), 0, True, "  the same tokens over 50 accepted and 49 rejected draft tokens\n"),
        (outputs(0, 0), 4, None, "verdict: inconclusive: part 3, greedy: no token was drafted"),
        (outputs(99, 50, WRONG), 3, False, "verdict: NOT LOSSLESS"),
    ],
    ids=["lossless", "inconclusive", "not lossless"],
)
def test_the_exit_code_is_the_certificates(
    result: TextResult,
    code: int,
    lossless: bool | None,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluator = SimpleNamespace(
        measure=lambda drafter: MeasuredAcceptance(2.0, 3, 4),
        certify=lambda drafter: Certificate(CertifyJob(quick=True), distribution=[DISTRIBUTION], outputs=[result]),
    )
    run: Any = SimpleNamespace(
        job=SimpleNamespace(out=tmp_path),
        config=SimpleNamespace(measure=True, certify=True),
        corpus=SimpleNamespace(report_documents=[]),
        drafter="eagle:head",
        evaluator=lambda held_out: evaluator,
    )
    (tmp_path / RUN_FILE).write_text("{}")
    assert finish(run) == code
    record = json.loads((tmp_path / RUN_FILE).read_text())
    assert record["lossless"] is lossless
    assert record["certificate"]["settings"][0]["rejected"] == result.drafted - result.accepted
    err = capsys.readouterr().err
    assert line in err and ("serve it with" in err) is (code != 3)
