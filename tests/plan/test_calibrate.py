"""Calibration with a few measured steps, and how well it predicts the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import RequestError
from foretell.plan.bench_reader import Observation, read_observations
from foretell.plan.calibrate import calibrate, least_squares, predicted_seconds, solve
from foretell.plan.drafter_cost import DrafterCost
from foretell.plan.steps import GPU
from foretell.utils.speculation_math import expected_tokens
from tests.plan.deployments import DATA, deployed, measured

WITHIN = 0.2


def known_steps(seen: list[Observation], length: int) -> list[Observation]:
    """Return steps at batch 1 and 512 tokens, plain and with free drafts of one length."""
    return [
        each
        for each in seen
        if each.batch == 1
        and each.context == 512
        and each.length in (0, length)
        and each.drafter != "model"
        and not each.of_draft
    ]


def errors(name: str, length: int) -> dict[Observation, float]:
    """Return the relative prediction error of each step that the calibration did not see."""
    path, target, draft = measured(name)
    seen, drafter = read_observations(path), DrafterCost("draft", draft)
    known = known_steps(seen, length)
    assert len(known) == 4, "two steps, on the device and by the wall clock"
    fitted = calibrate(target, drafter, known).efficiency
    return {
        each: predicted_seconds(target, drafter, fitted, each) / each.seconds - 1 for each in seen if each not in known
    }


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_batch_1_and_one_length_predict_the_other_steps_of_an_h200(length: int) -> None:
    """Other lengths, batch 8 and 32, 8k context and a draft model: all of 63 steps within 20%."""
    found = errors("h200-5.9b", length)
    assert {each.batch for each in found} == {1, 8, 32} and {each.context for each in found} == {512, 8192}
    assert len(found) == 63
    worst = max(found, key=lambda each: abs(found[each]))
    assert abs(found[worst]) <= WITHIN, (worst, found[worst])


def test_a_model_that_the_defaults_were_not_fitted_to() -> None:
    """2.4 billion weights: within 20% from one length, and within 30% from the others."""
    assert max(map(abs, errors("h200-2.4b", 4).values())) <= WITHIN
    for length in (1, 2, 8):
        found = list(errors("h200-2.4b", length).values())
        assert sum(abs(each) > WITHIN for each in found) <= 4 and max(map(abs, found)) <= 0.3


@pytest.mark.parametrize("name", ["h200-5.9b", "h200-2.4b"])
def test_speedups_are_predicted(name: str) -> None:
    """Tokens per step times plain over speculative step time."""
    path, target, _ = measured(name)
    seen, drafter = read_observations(path), DrafterCost("oracle")
    fitted = calibrate(target, drafter, known_steps(seen, 4)).efficiency
    walls = {(e.batch, e.context, e.length): e for e in seen if e.wall and e.drafter != "model"}
    checked = 0
    for (batch, context, length), speculative in walls.items():
        plain = walls[batch, context, 0]
        if not length:
            continue
        real = speculative.accepted * plain.seconds / speculative.seconds
        times = [predicted_seconds(target, drafter, fitted, each) for each in (plain, speculative)]
        assert speculative.accepted * times[0] / times[1] == pytest.approx(real, rel=WITHIN), speculative
        if batch > 1:  # the end of a request cuts its last draft, which matters with few tokens
            assert speculative.accepted == pytest.approx(expected_tokens(0.8, length), rel=0.1), speculative
        checked += 1
    assert checked == 24


def test_the_default_efficiency_is_within_25_percent() -> None:
    path, target, draft = measured("h200-5.9b")
    drafter = DrafterCost("draft", draft)
    for each in read_observations(path):
        assert predicted_seconds(target, drafter, GPU, each) == pytest.approx(each.seconds, rel=0.25), each


def test_many_steps_recover_a_given_efficiency() -> None:
    target = deployed("llama-3.1-8b", "h100")
    truth = replace(GPU, weights=0.7, cache=0.6, products=0.5, layer=20e-6, host=1e-3, draft_host=0.05e-3)
    drafter = DrafterCost("oracle")
    steps = [(batch, ctx, k) for batch in (1, 8, 32, 128) for ctx in (128, 4096, 32768) for k in (0, 2, 8)]
    seen = [
        replace(blank, seconds=predicted_seconds(target, drafter, truth, blank))
        for batch, ctx, k in steps
        for wall in (False, True)
        for blank in [Observation(batch, ctx, k, 1.0, wall, "oracle" if k else "none")]
    ]
    found = calibrate(target, drafter, seen)
    assert found.worst_error < 0.01 and found.steps == len(seen)
    for name in ("weights", "cache", "products", "host"):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=0.05), name


def test_values_without_observations_keep_their_prior() -> None:
    target = deployed("llama-3.1-8b", "h100")
    found = calibrate(target, DrafterCost("ngram"), [Observation(1, 512, 0, 12e-3, wall=False)]).efficiency
    assert found.weights < GPU.weights and (found.host, found.draft_host, found.link) == (
        GPU.host,
        GPU.draft_host,
        GPU.link,
    )
    assert calibrate(target, DrafterCost("ngram"), []).efficiency == GPU


def test_least_squares_and_its_linear_solver() -> None:
    assert solve([[2.0, 1.0], [1.0, 3.0]], [3.0, 5.0]) == pytest.approx([0.8, 1.4])
    found = least_squares(lambda at: [at[0] - 3, 2 * (at[1] + 1), at[0] * at[1] + 3], 2)
    assert found == pytest.approx([3, -1], abs=1e-4)


def test_a_bench_run_gives_plain_steps_and_those_of_fixed_lengths(tmp_path: Path) -> None:
    cell = {"plain_tokens_per_second": 200.0, "tokens_per_second": 300.0, "accepted_per_step": 1.8, "steps": 100,
            "time": {"drafting": 0.1}}  # fmt: skip
    reached = {"self:int8": [98, 97, 97, 96], "ngram": [70, 60, 55, 40], "exit:9": [99, 99], "auto": [99] * 9}
    cells = [{**cell, "arm": name, "places": {"reached": each}} for name, each in reached.items()]
    lengths = {name: None if name == "auto" else 4 for name in reached}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"bench": "drafters", "drafters": lengths, "overall": cells}))
    plain, speculative = read_observations(path)  # drafters with mostly shorter drafts are skipped
    assert (plain.length, plain.seconds, plain.wall) == (0, 1 / 200, True)
    assert (speculative.length, speculative.accepted) == (4, 1.8) and speculative.seconds == pytest.approx(
        1.8 / 300 * 0.9
    )


def test_the_figures_of_a_gpu_run_are_found_by_name(tmp_path: Path) -> None:
    seen = read_observations(DATA / "h200-gpu.json")
    run = json.loads((DATA / "h200-gpu.json").read_text())
    steps = {(each.batch, each.context, each.length, each.wall, each.of_draft): each.seconds for each in seen}
    assert steps[1, 512, 0, False, False] == run["step, 1 row, context 512"] / 1e3
    assert steps[32, 512, 4, False, False] == run["step, 32 texts of 5 rows"] / 1e3
    assert steps[8, 512, 0, True, False] == run["plain, batch 8: wall a step"] / 1e3
    # Of two figures with one name the last one remains, which is of the longer context.
    assert steps[1, 8192, 63, False, False] == pytest.approx(
        run["  64 rows over one"] * run["step, 1 row, context 8192"] / 1e3
    )
    log = tmp_path / "log"
    log.write_text("step 3.4 ms\n" + json.dumps(run) + "\n")
    assert read_observations(log) == seen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is not JSON"),
        ("{}", "has no timed steps"),
        ('{"bench": "grid", "cells": [{}]}', "is not what"),
        ('{"overall": [{"arm": "x"}]}', "is not what"),
    ],
)
def test_files_without_steps_are_rejected(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RequestError) as error:
        read_observations(path)
    assert words in str(error.value) and "bench" in str(error.value)
    with pytest.raises(RequestError, match="cannot be read"):
        read_observations(tmp_path / "none.json")
