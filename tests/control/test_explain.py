"""Break-even acceptance, measured costs, and the command `foretell explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import pytest

from foretell import LLM, SamplingParams
from foretell.cli.main import main
from foretell.control.adaptive import AdaptiveController
from foretell.engine.cost_profiler import CostProfiler
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import StepOutput
from foretell.runner.model_runner import ModelRunner
from foretell.types import Draft, ScheduledSequence
from foretell.utils.speculation_math import SpeculationCosts, break_even_acceptance, expected_tokens
from tests.fake_async import FakeAsyncExecutor
from tests.tiny import World

CHEAP = SpeculationCosts(lambda batch, length: 0.03 + 0.001 * batch * (1 + length), lambda batch, length: 0.0)
EXPENSIVE = SpeculationCosts(lambda batch, length: 0.01 * batch * (1 + length), lambda batch, length: 0.02 * length)


def test_break_even_is_a_speedup_of_1() -> None:
    for batch in (1, 16):
        for length in (1, 4):
            needed = CHEAP.break_even(batch, length)
            assert needed is not None
            assert CHEAP.speedup(batch, length, needed) == pytest.approx(1, abs=1e-5)
    assert CHEAP.break_even(1, 1) == pytest.approx(0.001 / 0.031, abs=1e-6)
    assert EXPENSIVE.break_even(1, 1) is None


@pytest.mark.parametrize("length", [0, 1, 5])
def test_expected_tokens_are_a_geometric_sum(length: int) -> None:
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        total = sum(acceptance**depth for depth in range(length + 1))
        assert expected_tokens(acceptance, length) == pytest.approx(total)
    assert break_even_acceptance(1.0, length) == pytest.approx(0.0, abs=1e-5)
    assert break_even_acceptance(length + 1.1, length) is None


def test_the_best_length_grows_with_acceptance_and_shrinks_with_the_batch() -> None:
    lengths = [CHEAP.best_length(1, rate, 16, 0.01)[0] for rate in (0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert CHEAP.best_length(64, 0.5, 16, 0.01)[0] < CHEAP.best_length(1, 0.5, 16, 0.01)[0]
    assert EXPENSIVE.best_length(1, 0.95, 16, 0.01) == (0, 1.0)


def _forward_takes(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> Callable[[], float]:
    """Return a clock that only target steps advance, by their rows."""
    now, run = [0.0], runner.forward

    def forward(work: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        now[0] += seconds(sum(each.num_new_tokens for each in work) + sum(map(len, drafts)))
        return run(work, drafts)

    monkeypatch.setattr(runner, "forward", forward)
    return lambda: now[0]


def test_costs_are_measured_saved_and_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    llm = LLM(tiny_folder, drafter="ngram,exit:1", quiet=True)
    controller = llm.engine.controller
    assert isinstance(controller, AdaptiveController)
    assert controller.costs.is_known, "the most useful costs are measured at start"
    (saved,) = (tmp_path / "costs").iterdir()
    assert not json.loads(saved.read_text())["complete"]
    assert LLM(tiny_folder, drafter="ngram,exit:1", quiet=True).assembly.profiler.run_one(), "the others are left"
    controller.costs.load({})
    before = llm.engine.runner.pool.num_held
    clock = _forward_takes(llm.engine.runner, monkeypatch, lambda rows: 0.01 + 0.001 * rows)
    monkeypatch.setattr("foretell.engine.cost_profiler.perf_counter", clock)
    llm.measure()
    assert llm.engine.runner.pool.num_held == before == 0, "dummy sequences free their pages"
    for rows in (1, 4, 16):
        assert controller.costs.seconds(rows) == pytest.approx(0.01 + 0.001 * rows, rel=0.1), rows
    assert json.loads(saved.read_text())["complete"]
    again = LLM(tiny_folder, drafter="ngram", quiet=True)
    assert again.engine.plain_seconds(1, 0) == pytest.approx(controller.costs.seconds(1))
    assert not again.assembly.profiler.run_one(), "nothing is left to measure"
    saved.write_text("{")
    monkeypatch.setattr("foretell.engine.cost_profiler.perf_counter", perf_counter)
    damaged = LLM(tiny_folder, drafter="ngram", quiet=True)
    assert damaged.engine.plain_seconds(1, 0), "they are measured again"
    assert damaged.generate("a b", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


class SlowHost(FakeAsyncExecutor):
    """An executor whose host takes 0.5 s to send a step and whose device takes 0.01 s to run it."""

    now = 0.0

    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        self.now += 0.5
        output = super().forward(packed, hidden_layers)
        assert output.argmax is not None
        return replace(output, argmax=partial(self.wait, output.argmax))

    def wait(self, argmax: Callable[[], list[int]]) -> list[int]:
        self.now += 0.01
        return argmax()


def test_host_time_before_an_async_step_is_not_part_of_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, controller = World(pages=256).engine(None), AdaptiveController({})
    engine.runner.executor = sent = SlowHost(engine.runner.executor)
    monkeypatch.setattr("foretell.engine.cost_profiler.perf_counter", lambda: sent.now)
    CostProfiler(engine, controller).run()
    assert controller.costs.single_row_seconds == pytest.approx(0.01, rel=0.1)


def test_profiling_without_free_pages_is_skipped(tiny_folder: Path, tmp_path: Path) -> None:
    llm = LLM(tiny_folder, drafter="ngram", max_model_len=64, max_num_seqs=1, quiet=True)
    llm.assembly.profiler.file = None
    llm.measure()
    assert llm.engine.runner.pool.num_held == 0


def test_the_command_prints_a_report_or_json(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    model = ["--model", str(tiny_folder), "--drafter", "ngram,exit:1"]
    assert main(["explain", *model]) == 0
    report = capsys.readouterr().out
    assert "ngram: break-even acceptance rate by batch size and draft length" in report
    assert max(map(len, report.splitlines())) <= 80
    assert "exit:1: draft time in ms by number of draft tokens" in report
    assert main(["explain", *model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["drafters"]) == {"ngram", "exit:1"}
    assert found["drafters"]["ngram"]["draft_ms"]["4"] == 0
    assert found["drafters"]["exit:1"]["draft_ms"]["4"] > 0
    assert main(["explain", "--model", str(tiny_folder), "--drafter", "none"]) == 2
