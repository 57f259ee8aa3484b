"""The certificate passes lossless rules and fails all others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from foretell import LLM
from foretell.bench.prompt import BenchPrompt
from foretell.certify.certificate import CertifyJob, _rules
from foretell.certify.distribution_test import (
    FALSE_ALARM,
    FULL_RUN_DISTANCE,
    NUM_SETTINGS,
    SETTINGS,
    TREE,
    SamplingSetting,
    check_distribution,
    check_draft_sampling,
    chi_squared_tail,
    detectable_distance,
    likelihood_ratio,
    samples_needed,
    sampling_drafter,
    tiny_engine,
)
from foretell.certify.exact import check_exact, drift
from foretell.certify.known_bugs import KNOWN_BUGS, KnownBug
from foretell.certify.text_equality import Difference
from foretell.cli.main import main
from foretell.draft.ngram import NGramDrafter
from foretell.errors import RequestError
from foretell.verify.lossy import ThresholdSettings

RULES = ("match", "rejection", "block")


@pytest.mark.parametrize("rule", RULES)
def test_the_built_in_rules_are_exact(rule: str) -> None:
    result = check_exact(rule)
    assert result.passed
    assert result.worst < 1e-12
    assert result.cases >= 30


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", [*SETTINGS, TREE], ids=lambda setting: setting.name)
def test_outputs_of_the_engine_follow_the_target(rule: str, setting: SamplingSetting) -> None:
    result = check_distribution(tiny_engine(setting.drafter(), draft_length=setting.draft_length), rule, setting, 800)
    assert result.passed, result
    assert 0.05 < result.accepted < 0.8, "some draft tokens are accepted and some rejected"


@pytest.mark.parametrize("rule", RULES)
def test_outputs_with_drafts_that_are_not_sampled_follow_the_target(rule: str) -> None:
    assert check_distribution(tiny_engine(NGramDrafter(1, 2)), rule, SETTINGS[0], 1500).passed


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_a_known_bug_is_caught(name: str) -> None:
    bug = KNOWN_BUGS[name]
    rules = _rules(CertifyJob(rule="rejection", plant=name), bug)
    setting = SETTINGS[1 if name == "draft-temperature-ignored" else 2]
    engine = tiny_engine(bug.drafter(sampling_drafter()), rules, setting.draft_length)
    assert not check_distribution(engine, "rejection", setting, 2500).passed


@pytest.mark.parametrize(("name", "lossless"), [("right", True), ("accepts_everything", False)])
def test_a_custom_rule_is_certified(name: str, lossless: bool) -> None:
    job = CertifyJob(rule=f"tests.certify.rules:{name}")
    engine = tiny_engine(sampling_drafter(), _rules(job, KnownBug()))
    assert check_distribution(engine, job.request_rule, SETTINGS[0], 2000).passed == lossless


def test_a_rule_that_is_wrong_only_for_drafts_not_sampled_is_found() -> None:
    job = CertifyJob(rule="tests.certify.rules:wrong_if_not_sampled")
    results = [
        check_distribution(tiny_engine(s.drafter(), _rules(job, KnownBug()), s.draft_length), job.request_rule, s, 1500)
        for s in (SETTINGS[0], SETTINGS[3])
    ]
    assert [result.passed for result in results] == [True, False]


def test_a_known_bug_replaces_a_built_in_rule_only() -> None:
    with pytest.raises(RequestError, match="built-in"):
        CertifyJob(rule="tests.certify.rules:right", plant="ratio-inverted")
    with pytest.raises(RequestError, match="max_tokens"):
        CertifyJob(max_tokens=0)


@pytest.mark.slow
def test_a_full_run_detects_an_acceptance_probability_off_by_three_percent() -> None:
    samples = samples_needed(FULL_RUN_DISTANCE, NUM_SETTINGS)
    results = []
    for setting in SETTINGS:
        job = CertifyJob(rule="tests.certify.rules:off_by_three_percent")
        engine = tiny_engine(setting.drafter(), _rules(job, KnownBug()), setting.draft_length)
        results.append(check_distribution(engine, job.request_rule, setting, samples))
        if not results[-1].passed:
            return
    pytest.fail(f"not found: {results}")


def test_the_test_has_the_stated_power() -> None:
    """By simulation: 64 equally likely outputs, half of them shifted up and half down by the detectable distance."""
    assert detectable_distance(samples_needed(0.01, NUM_SETTINGS), NUM_SETTINGS) == pytest.approx(0.01, rel=1e-3)
    assert chi_squared_tail(103.4, 63) == pytest.approx(0.001, abs=0.0005)
    samples = 20_000
    distance = detectable_distance(samples, NUM_SETTINGS)
    generator = torch.Generator().manual_seed(1)
    outputs = [(i,) for i in range(64)]
    shifted = torch.full((64,), 1 / 64)
    shifted[::2] += distance / 32
    shifted[1::2] -= distance / 32
    for probs, low, high in ((shifted, 0.975, 1.0), (torch.full((64,), 1 / 64), 0.0, 0.01)):
        found = 0
        for _ in range(400):
            sampled = torch.multinomial(probs, samples, replacement=True, generator=generator)
            counts = Counter(
                {output: int(n) for output, n in zip(outputs, torch.bincount(sampled, minlength=64), strict=True)}
            )
            statistic, freedom = likelihood_ratio(counts, dict.fromkeys(outputs, 1 / 64), samples)
            found += chi_squared_tail(statistic, freedom) < FALSE_ALARM / NUM_SETTINGS
        assert low <= found / 400 <= high


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(RequestError, match="did you mean 'match'"):
        CertifyJob(rule="mach")


@pytest.mark.parametrize("rule", ["confidence", "typical", "ensemble"])
def test_a_lossy_rule_fails_and_its_drift_is_reported(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--rule", rule, "--json"]) == 3
    out, err = capsys.readouterr()
    assert 0.02 < json.loads(out)["drift"] < 0.6
    assert "lossy by design" in err


def test_the_drift_of_a_lossless_rule_is_0_and_that_of_an_ensemble_follows_its_weight() -> None:
    assert drift("rejection") < 1e-12
    assert drift("ensemble", ThresholdSettings(weight=1.0)) < 1e-12
    assert drift("ensemble", ThresholdSettings(weight=0.4)) > drift("ensemble", ThresholdSettings(weight=0.8)) > 0.01


def test_the_command_fails_with_exit_code_3(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.certify.certificate.QUICK_SAMPLES", 2000)
    words = ["certify", "--model", str(tiny_folder), "--quick", "--max-tokens", "9", "--json"]
    assert main([*words, "--plant", "residual-not-subtracted"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["lossless"] is False
    assert "NOT LOSSLESS" in err
    assert main([*words, "--rule", "tests.certify.rules:invalid_path"]) == 3
    assert "does not follow the draft" in json.loads(capsys.readouterr().out)["broken"]
    assert main([*words, "--rule", "no.such.module:rule"]) == 2
    assert main([*words, "--plant", "nothing"]) == 2
    assert main([*words, "--drafter", "nothing"]) == 2
    assert "plant" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["match", *(pytest.param(r, marks=pytest.mark.slow) for r in ("rejection", "block"))])
def test_the_command_passes_a_lossless_rule(
    capsys: pytest.CaptureFixture[str],
    tiny_folder: Path,
    tmp_path: Path,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foretell.certify.certificate.QUICK_SAMPLES", 500)
    monkeypatch.setattr("foretell.certify.certificate.KNOWN_BUG_SAMPLES", 1500)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The quick brown fox\n\nShe sells sea shells by the\n")
    words = ["certify", "--model", str(tiny_folder), "--drafter", "self:int4", "--rule", rule, "--quick"]
    words += ["--prompts", str(prompts), "--max-tokens", "40", "--out", str(tmp_path / "report.json")]
    assert main(words) == 0
    said = capsys.readouterr().out
    line = re.search(r"^verdict: lossless \(tests would have detected a total variation of (0\.\d{3})\)$", said, re.M)
    assert line is not None and 0 < float(line[1]) < 1
    assert re.search(r"^  the same .*tokens over \d+ accepted and \d+ rejected draft tokens", said, re.M)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"] is True and report["verdict"] == "lossless" and report["reasons"] == []
    for each in (*report["draws"], *report["texts"]):
        assert each["drafted"] > each["rejected"] > 0
    assert set(report["planted_bugs_caught"]) == set(KNOWN_BUGS)
    assert [each["texts"] for each in report["texts"]] == [2] * (2 if rule == "match" else 1)


def test_the_given_number_of_tokens_is_compared(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.certify.certificate.QUICK_SAMPLES", 500)
    monkeypatch.setattr("foretell.certify.certificate.KNOWN_BUG_SAMPLES", 1500)
    messages = [({"role": "user", "content": f"Tell me of {what}."},) for what in ("tea", "the sea", "salt")]
    monkeypatch.setattr(
        "foretell.bench.workloads.own", lambda: (BenchPrompt(str(i), "chat", each) for i, each in enumerate(messages))
    )
    words = ["certify", "--model", str(tiny_folder), "--drafter", "self:int4", "--quick", "--json"]
    assert main([*words, "--tokens", "200"]) == 0
    found = json.loads(capsys.readouterr().out)["texts"]
    assert [(each["texts"], each["tokens"]) for each in found] == [(3, 3 * 34)] * 2, "divided among the prompts"
    for wrong in (["--max-tokens", "9"], ["--prompts", "some.txt"]):
        assert main([*words, "--tokens", "600", *wrong]) == 2
    assert main([*words, "--tokens", "0"]) == main([*words, "--max-tokens", "0"]) == 2
    assert "leave out --prompts and --max-tokens" in capsys.readouterr().err


def test_outputs_beyond_the_context_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr("foretell.certify.certificate.certify", begun)
    item = BenchPrompt("0", "chat", ({"role": "user", "content": "Tell me of tea."},))
    monkeypatch.setattr("foretell.bench.workloads.own", lambda: iter([item, item]))
    (tmp_path / "long.txt").write_text("word " * 3000)
    words = ["certify", "--model", str(tiny_folder), "--drafter", "ngram", "--quick"]
    for more, message in (
        (["--tokens", "100000"], "tokens: are 25000 per output over 2 prompts"),
        (["--max-tokens", "5000"], "max_tokens: after a prompt of"),
        (["--max-tokens", "60", "--max-model-len", "120"], "a context of 120 leaves"),
        (["--prompts", str(tmp_path / "long.txt")], "give shorter ones"),
    ):
        assert main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert message in said
        if (most := re.search(r"ask for (\d+) or fewer", said)) is not None:
            fitting = [*words, *more[:1], most[1], *more[2:]]
            assert main(fitting) == 1 and "it has begun" in capsys.readouterr().err, "the suggested value works"
            assert main([*words, *more[:1], str(int(most[1]) + 1), *more[2:]]) == 2
            capsys.readouterr()


def test_no_difference_is_a_near_tie_where_kernels_are_batch_invariant() -> None:
    assert Difference(0, 3, 1, 2, margin=1e-6, bound=1e-3).near_tie
    assert not Difference(0, 3, 1, 2, margin=0.0, bound=0.0).near_tie


@pytest.mark.parametrize("name", [None, "draft-temperature-ignored"])
def test_a_drafter_must_sample_from_the_distribution_it_states(tiny_folder: Path, name: str | None) -> None:
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", num_speculative_tokens=4, quiet=True)
    if name is not None:
        llm.engine.drafter = KNOWN_BUGS[name].drafter(llm.engine.drafter)
    torch.manual_seed(0)
    prompts = [[5 + i, 9, 30 + i] for i in range(40)]
    result = check_draft_sampling(llm, prompts, "rejection", 40)
    assert result.num_tokens > 500
    assert result.passed == (name is None)
