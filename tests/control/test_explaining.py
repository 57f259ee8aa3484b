"""From when on guesses pay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from foretell import LLM, SamplingParams
from foretell.cli.main import main
from foretell.control.adaptive import AdaptiveController
from foretell.control.decision_log import Prices
from foretell.engine.cost_profiler import CostProfiler
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import StepOutput
from foretell.runner.model_runner import ModelRunner
from foretell.types import Draft, ScheduledSequence
from tests.outruns import Outruns
from tests.tiny import World

CHEAP = Prices(lambda texts, nodes: 0.03 + 0.001 * texts * (1 + nodes), lambda texts, nodes: 0.0)
DEAR = Prices(lambda texts, nodes: 0.01 * texts * (1 + nodes), lambda texts, nodes: 0.02 * nodes)


def test_break_even_is_where_the_speed_is_that_of_plain() -> None:
    for texts in (1, 16):
        for nodes in (1, 4):
            need = CHEAP.break_even(texts, nodes)
            assert need is not None
            assert CHEAP.speedup(texts, nodes, need) == pytest.approx(1, abs=1e-6)
    assert CHEAP.break_even(1, 1) == pytest.approx(0.001 / 0.031)
    assert DEAR.break_even(1, 1) is None


def test_the_best_length_grows_with_the_rate_and_shrinks_with_the_crowd() -> None:
    lengths = [CHEAP.best(1, rate, 16, 0.01)[0] for rate in (0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert CHEAP.best(64, 0.5, 16, 0.01)[0] < CHEAP.best(1, 0.5, 16, 0.01)[0]
    assert DEAR.best(1, 0.95, 16, 0.01) == (0, 1.0)


def _forward_takes(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> Callable[[], float]:
    """A clock that only the target's steps move, by the rows they run: the machine's own pace is left out."""
    now, run = [0.0], runner.forward

    def forward(work: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        now[0] += seconds(sum(share.num_new_tokens for share in work) + sum(map(len, drafts)))
        return run(work, drafts)

    monkeypatch.setattr(runner, "forward", forward)
    return lambda: now[0]


def test_costs_are_measured_kept_and_taken_up_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    llm = LLM(tiny_folder, drafter="ngram,exit:1", quiet=True)
    controller = llm.engine.controller
    assert isinstance(controller, AdaptiveController)
    assert not controller.costs.known
    before = llm.engine.runner.pool.num_held
    clock = _forward_takes(llm.engine.runner, monkeypatch, lambda rows: 0.01 + 0.001 * rows)
    monkeypatch.setattr("foretell.engine.cost_profiler.perf_counter", clock)
    llm.measure()
    assert llm.engine.runner.pool.num_held == before == 0, "made-up texts give their pages back"
    for rows in (1, 4, 16):
        assert controller.costs.seconds(rows) == pytest.approx(0.01 + 0.001 * rows, rel=0.1), rows
    (kept,) = (tmp_path / "costs").iterdir()
    again = LLM(tiny_folder, drafter="ngram", quiet=True)
    assert again.engine.plain_seconds(1, 0) == pytest.approx(controller.costs.seconds(1))
    assert not again.assembly.profiler.run_one(), "nothing is left to measure"
    kept.write_text("{")
    spoilt = LLM(tiny_folder, drafter="ngram", quiet=True)
    assert spoilt.engine.plain_seconds(1, 0) is None
    assert spoilt.generate("a b", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


class Sent(Outruns):
    """It takes the host half a second to send a step, and the device a hundredth to run it."""

    now = 0.0

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        self.now += 0.5
        output = super().forward(packed, taps)
        assert output.argmax is not None
        return replace(output, argmax=partial(self.wait, output.argmax))

    def wait(self, likeliest: Callable[[], list[int]]) -> list[int]:
        self.now += 0.01
        return likeliest()


def test_where_steps_are_sent_ahead_what_the_host_does_before_is_no_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, controller = World(pages=256).engine(None), AdaptiveController({})
    engine.runner.executor = sent = Sent(engine.runner.executor)
    monkeypatch.setattr("foretell.engine.cost_profiler.perf_counter", lambda: sent.now)
    CostProfiler(engine, controller).run()
    assert controller.costs.single == pytest.approx(0.01, rel=0.1)


def test_measuring_needs_pages_and_does_without_where_there_are_none(tiny_folder: Path, tmp_path: Path) -> None:
    llm = LLM(tiny_folder, drafter="ngram", max_model_len=64, max_num_seqs=1, quiet=True)
    llm.assembly.profiler.file = None
    llm.measure()
    assert llm.engine.runner.pool.num_held == 0


def test_the_command_tells_it_in_words_and_in_json(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    model = ["--model", str(tiny_folder), "--drafter", "ngram,exit:1"]
    assert main(["explain", *model]) == 0
    said = capsys.readouterr().out
    assert "how often a guess must stand" in said
    assert "exit:1: milliseconds to draft" in said
    assert main(["explain", *model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["drafters"]) == {"ngram", "exit:1"}
    assert found["drafters"]["ngram"]["draft_ms"]["4"] == 0
    assert found["drafters"]["exit:1"]["draft_ms"]["4"] > 0
    assert main(["explain", "--model", str(tiny_folder), "--drafter", "none"]) == 2
