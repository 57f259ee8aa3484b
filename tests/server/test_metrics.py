"""Metric definitions, on steps with known results."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.build.engine_builder import build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.control.decision_log import DecisionLog
from foretell.draft.mix import MixDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.supervisor import Supervisor
from foretell.engine.async_engine import AsyncEngine
from foretell.engine.streams import StepTiming
from foretell.sampling_params import SamplingParams
from foretell.server.choice_state import ChoiceState
from foretell.server.config import ServerConfig
from foretell.server.memory_report import ProcessMemory
from foretell.server.metrics import PREFIX, Metrics, Speedup
from foretell.server.service import Service
from foretell.server.usage import spec_metrics
from foretell.types import Budget, Draft, Sequence, StepTimes
from tests.server.process import MODEL_LABEL
from tests.server.test_async_engine import PROMPT, requests
from tests.tiny import VOCAB, World, add, run

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
TOKENS, RIGHT, NODES = 16, 2, 4


def decided() -> DecisionLog:
    """Return a log of five steps in which one drafter was better than the other, and two in which none drafted."""
    decisions = DecisionLog({"half", "other"})
    for chosen in ("half",) * 5 + ("",) * 2:
        decisions.record(("half", "other"), ("half", "other"), True, chosen, "pays")
    return decisions


def truth() -> list[int]:
    engine = World(max_num_seqs=4).engine()
    (track,) = add(engine, "1", PROMPT, max_tokens=TOKENS, ignore_eos=True)
    run(engine)
    return track.seq.tokens[len(PROMPT) :]


def half_right() -> ScriptedDrafter:
    """A drafter whose first two draft tokens are accepted and the others rejected."""
    text = truth()

    def propose(seq: Sequence, budget: Budget) -> Draft:
        right = text[seq.num_output_tokens : seq.num_output_tokens + min(RIGHT, budget.nodes)]
        wrong = [
            (token + 1) % VOCAB for token in text[seq.num_output_tokens + RIGHT : seq.num_output_tokens + budget.nodes]
        ]
        return Draft.chain([*right, *wrong], "half")

    drafter = ScriptedDrafter(propose)
    drafter.name = "half"
    return drafter


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> ProcessMemory:
    """Make the process memory constant."""
    still = ProcessMemory(now=5_000, peak=6_000, files=2_000)
    monkeypatch.setattr("foretell.server.metrics.process_memory", lambda: still)
    return still


def test_resident_and_file_backed_memory_are_exposed(memory: ProcessMemory) -> None:
    exposed = samples(Metrics("m"))
    assert (exposed[PREFIX + "resident_memory_bytes"], exposed[PREFIX + "resident_file_bytes"]) == (
        memory.now,
        memory.files,
    )


def samples(metrics: Metrics, names: str = "foretell") -> dict[str, float]:
    lines = metrics.expose(names).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {MODEL_LABEL.sub("", name).replace("{}", ""): float(value) for name, value in pairs}


def served() -> tuple[Metrics, ChoiceState]:
    """One sequence, five steps with a draft: 4 of 4 draft tokens accepted and, with two tokens left, 1 of 2."""
    metrics = Metrics("m", decisions=decided())

    async def scene() -> ChoiceState:
        engine = AsyncEngine(World(max_num_seqs=4, budget=NODES).engine(half_right()), 4, metrics.observe)
        engine.start()
        made = requests(engine.engine, "a", TOKENS)
        answer = ChoiceState(made[0], 0)
        async for piece in engine.submit(made).items():
            answer.add(piece)
        await engine.stop()
        return answer

    return metrics, asyncio.run(scene())


def test_counters_have_the_values_of_the_definitions() -> None:
    metrics, _ = served()
    found = samples(metrics)
    expected = {
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 4 * NODES + 2,
        "spec_decode_num_accepted_tokens_total": 10,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 5,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 5,
        "speculative_decoding_accepted_tokens_total": 10,
        "speculative_decoding_rejected_tokens_total": 8,
        "speculative_decoding_acceptance_rate": 10 / 18,
        'spec_decode_skipped_total{reason="first_token"}': 1,
        "generation_tokens_total": TOKENS,
        "prompt_tokens_total": len(PROMPT),
        'request_success_total{finished_reason="length"}': 1,
        'drafter_draft_tokens_total{drafter="half"}': 18,
        'drafter_accepted_tokens_total{drafter="half"}': 10,
        "time_to_first_token_seconds_count": 1,
        "time_per_output_token_seconds_count": 1,
    }
    assert {name: found[PREFIX + name] for name in expected} == pytest.approx(expected)
    assert metrics.totals.mean_acceptance_length == 1 + 10 / 5
    assert metrics.totals.per_position == [5, 5]
    theirs = samples(metrics, "vllm")
    assert theirs["vllm:spec_decode_num_drafts_total"] == 5 and not any("foretell:" in name for name in theirs)
    assert {**found, **theirs} == samples(metrics, "both")


def test_controller_decisions_are_exposed_by_drafter_and_reason() -> None:
    decisions = decided()
    decisions.on, decisions.num_switches = False, 3
    metrics = Metrics("m", decisions=decisions)
    before = samples(metrics)
    assert (before[PREFIX + "drafting_on"], before[PREFIX + "drafting_switches_total"]) == (0, 3)
    assert samples(metrics) == before, "what is followed is not counted twice"
    decisions.record(("half",), ("half",), True, "half", "pays")
    found = {name: value for name, value in samples(metrics).items() if "decisions" in name}
    name = PREFIX + 'drafter_decisions_total{{decision="{1}",drafter="{0}",reason="{2}"}}'
    assert found == {
        name.format("half", "drafted", "pays"): 6,
        name.format("half", "skipped", "low_accept"): 2,
        name.format("other", "skipped", "outdone"): 5,
        name.format("other", "skipped", "low_accept"): 2,
    }


def test_without_a_controller_speculation_is_on_and_nothing_was_decided() -> None:
    found = samples(Metrics("m"))
    assert (found[PREFIX + "drafting_on"], found[PREFIX + "drafting_switches_total"]) == (1, 0)
    assert not any("decisions_total" in name for name in found)


def test_failures_of_drafters_and_their_pauses_are_shown() -> None:
    clock = [0.0]
    drafter = MixDrafter([half_right()], supervisor=Supervisor(lambda: clock[0]))
    engine = World(max_num_seqs=4, budget=NODES).engine(drafter)
    metrics = Metrics("m", health=lambda: engine.safe_drafter.health)
    name = PREFIX + '{}{{drafter="half"}}'

    def shown() -> tuple[float, float]:
        found = samples(metrics)
        return found[name.format("drafter_failures_total")], found[name.format("drafter_disabled")]

    assert shown() == (0, 0), "both are there from the start"
    for _ in range(3):
        drafter.supervisor.fail("half", "propose", ValueError("planted"))
    assert shown() == (3, 1)
    clock[0] += 1.0
    assert shown() == (3, 0)


@pytest.mark.parametrize("drafter", ["auto", "ngram"])
def test_metrics_read_the_engines_controller(drafter: str, folder: Path) -> None:
    speculation = SpeculationConfig(drafter=drafter)
    engine = EngineConfig(model=str(folder))
    service = Service(build_engine(engine, speculation), ServerConfig(), engine, speculation)
    maker = service.assembly.requests
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for request in maker.make("a", [4, 5, 6, 7] * 3, params):
        service.assembly.engine.add(request)
    run(service.assembly.engine)
    found = [name for name in samples(service.metrics) if "drafter_decisions_total" in name]
    arms = service.assembly.engine.drafter.default_drafters
    assert {re.findall('drafter="([^"]*)"', name)[0] for name in found} == set(arms) - {"prediction"}


def test_response_statistics_equal_the_metrics() -> None:
    _, answer = served()
    exposed: Any = spec_metrics([answer], NODES, detailed=True)
    assert exposed["speculative_decoding"] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 10 / 18,
        "acceptance_histogram": [0, 0, 5, 0, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 18,
        "num_spec_tokens": NODES,
        "acceptance_histogram_by_draft_length": {"2": [0, 0, 1], "4": [0, 0, 4, 0, 0]},
        "per_step_accepted": [2] * 5,
        "per_step_drafted": [4, 4, 4, 4, 2],
    }


def report(tokens: list[int], drafted: int, seconds: float, rows: int | None = None, host: float = 0.0) -> Any:
    items = [SimpleNamespace(delta=SimpleNamespace(tokens=(1,) * count, drafted=drafted)) for count in tokens]
    rows = len(tokens) * (1 + drafted) if rows is None else rows
    times = StepTimes(0.0, seconds - host)
    timing = StepTiming(0.0, seconds, times, rows, len(tokens), drafted * len(tokens), context_tokens=100)
    return SimpleNamespace(items=items, timing=timing)


def test_speedup_is_tokens_times_plain_step_time_over_time_taken() -> None:
    found = Speedup(lambda batch, context: 0.01 * batch)
    assert found.value is None
    found.observe(report([3], 4, 0.02))  # three tokens in two plain steps' time
    assert found.value == pytest.approx(1.5)
    found.observe(report([2, 4], 4, 0.03))  # a plain step of two takes 0.02: six tokens would take 0.06
    assert found.value == pytest.approx((0.03 + 0.06) / (0.02 + 0.03))
    before = found.value
    found.observe(report([1], 0, 9.0, rows=200))  # the step also prefilled a prompt
    found.observe(report([], 0, 9.0, rows=200))
    assert found.value == before
    busy = Speedup(lambda batch, context: 0.01)
    busy.observe(report([3], 4, 0.03, host=0.005))  # a plain step would have the same 0.005 of host time
    assert busy.value == pytest.approx(3 * 0.015 / 0.03)
    unknown = Speedup(lambda batch, context: None)
    unknown.observe(report([3], 4, 0.02))
    assert unknown.value is None


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    there = {name.split("{")[0] for name in samples(served()[0])}
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"foretell:\w+", target["expr"])
    }
    assert asked and asked <= there | {"foretell:request_failures_total"}
