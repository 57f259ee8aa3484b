"""Never slower: the bar, inconclusive cells, the grid, and the exit codes of the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from foretell.bench.batch_backend import EngineBatchBackend, variations, with_min_tokens
from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
from foretell.bench.measure import PLAIN, Batch, BatchResult, MeasureJob, Variant
from foretell.bench.never_slower import NeverSlowerCell, NeverSlowerResult, measure_cell, remarks, report_table, run
from foretell.bench.never_slower_grid import (
    CellSettings,
    GridCell,
    adaptive_variant,
    all_cells,
    fixed_variants,
    select_cells,
    variants_to_load,
)
from foretell.bench.never_slower_stats import CellTimes, NeverSlowerVerdict, worst_verdict
from foretell.bench.prompt import BenchPrompt
from foretell.bench.settings import BenchSettings
from foretell.bench.synthetic_drafters import ORACLE_ERROR_RATE, UselessDrafter
from foretell.build.model_source import no_progress, open_model
from foretell.cli import main as program
from foretell.cli.bench_never_slower import exit_code
from foretell.config import EngineConfig
from foretell.draft.scripted import OracleDrafter
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Request
from foretell.types import Sequence as Text
from tests.server.process import write_server_folder

from .fakes import ignore_progress, items

SCENE = GridCell("chat", 0.0, 2, "ngram")
EXTENT = CellSettings(lengths=(4,), min_sequences=4, max_tokens=8, rounds=3, max_rounds=7)


def contest(adaptive: Sequence[float], fixed: float = 0.5, plain: Sequence[float] | None = None) -> CellTimes:
    """By speedups: of the adaptive arm in each round, and of the fixed length."""
    times = plain or [1.0] * len(adaptive)
    return CellTimes(
        [times],
        [[time / speedup for time, speedup in zip(times, adaptive, strict=True)]],
        {4: [[time / fixed for time in times]]},
    )


@pytest.mark.parametrize(
    ("adaptive", "fixed", "verdict"),
    [
        (0.98, 0.5, "held"),
        (0.96, 0.5, "slower"),
        (1.90, 2.0, "held"),
        (1.80, 2.0, "slower"),
        (1.00, 2.0, "slower"),  # never drafting does not pass
    ],
)
def test_the_bar_is_set_by_plain_decoding_and_by_the_best_length(
    adaptive: float, fixed: float, verdict: NeverSlowerVerdict
) -> None:
    found = contest([adaptive] * 3, fixed)
    assert found.verdict == verdict
    assert found.bar == pytest.approx(max(0.97, 0.93 * fixed))
    assert found.speedup == pytest.approx(adaptive)
    assert found.best_fixed == (4 if fixed > 1 else 0)


@pytest.mark.parametrize(
    ("adaptive", "verdict"),
    [
        ([0.8, 0.97, 1.2, 0.9, 1.1], "inconclusive"),
        ([1.5, 1.8, 2.2, 1.6, 2.0], "held"),  # however noisy, it is above
        ([0.5, 0.6, 0.8, 0.7, 0.4], "slower"),
        ([1.5], "inconclusive"),  # one round tells nothing of others
    ],
)
def test_noise_leaves_a_verdict_only_where_the_bar_is_outside(
    adaptive: list[float], verdict: NeverSlowerVerdict
) -> None:
    found = contest(adaptive)
    assert found.verdict == verdict
    assert found.noise is None or found.noise > 0.1


def test_what_the_machine_does_to_a_whole_round_is_no_noise() -> None:
    found = contest([1.0] * 4, plain=[1.0, 3.0, 2.0, 9.0])
    assert found.noise == pytest.approx(0.0) and found.verdict == "held"


def test_the_noise_of_the_best_length_counts() -> None:
    rounds = [1.0] * 5
    steady = CellTimes([rounds], [[0.5] * 5], {4: [[0.5] * 5]})
    shaky = CellTimes([rounds], [[0.5] * 5], {4: [[0.5, 0.4, 0.6, 0.45, 0.55]]})
    assert steady.noise == pytest.approx(0.0) and shaky.noise is not None and shaky.noise > 0.1
    assert (steady.verdict, shaky.verdict) == ("held", "inconclusive")


def test_a_point_estimate_above_the_bar_is_not_enough() -> None:
    found = contest([0.95, 0.98, 1.01])
    assert found.speedup > found.bar and found.verdict == "inconclusive"


def test_a_fixed_length_that_is_clearly_faster_is_enough_to_be_slower() -> None:
    rounds = [1.0, 1.01, 0.99]
    found = CellTimes([rounds], [rounds], {2: [[0.5, 0.51, 0.49]], 4: [[0.5, 2.0, 1.0]]})
    assert found.verdict == "slower"


def test_the_worst_verdict_counts() -> None:
    assert worst_verdict(["held", "inconclusive"]) == "inconclusive"
    assert worst_verdict(["inconclusive", "slower", "held"]) == "slower"
    assert worst_verdict(["held"]) == "held"


class FakeBatches:
    """A stage whose clock is a function of the arm and the round."""

    def __init__(
        self, seconds: Callable[[str, int], float], texts: Callable[[str], tuple[int, ...]] = lambda variant: (1, 2)
    ) -> None:
        self.seconds, self.outputs = seconds, texts
        self.log: list[tuple[str, str]] = []
        self.refreshed = 0
        self.stop_after: int | None = None

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        params = variations(items, batch * batches)
        jobs = [MeasureJob(item.id, item.task, 0, (1,), SamplingParams()) for item in params]
        return [tuple(jobs[i : i + batch]) for i in range(0, len(jobs), batch)]

    def reset(self, variants: Sequence[Variant]) -> None:
        self.refreshed += 1

    def generate(self, variant: Variant, batch: Batch) -> BatchResult:
        if len(self.log) == self.stop_after:
            raise KeyboardInterrupt
        self.log.append((variant.name, batch[0].prompt_id))
        outputs = (self.outputs(variant.name),) * len(batch)
        return BatchResult(
            outputs, steps=len(batch), timed_tokens=len(batch), seconds=self.seconds(variant.name, self.refreshed - 1)
        )


def steady(variant: str, number: int) -> float:
    return {PLAIN.name: 1.0, "ngram, adaptive": 0.5, "ngram, 4 tokens": 0.52}[variant] * (100 if number == 0 else 1)


def noisy(variant: str, number: int) -> float:
    return 1.0 if variant == PLAIN.name else [0.8, 1.2, 1.0][number % 3]


def test_a_quiet_cell_takes_its_rounds_and_drops_the_first() -> None:
    backend = FakeBatches(steady)
    cell, _ = measure_cell(backend, SCENE, items(chat=4), EXTENT)
    assert backend.refreshed == 1 + EXTENT.rounds and cell.rounds == EXTENT.rounds
    assert cell.speedup == pytest.approx(2.0) and cell.fixed == {0: 1.0, 4: pytest.approx(1 / 0.52)}
    assert (cell.best_fixed, cell.verdict, cell.same_text, cell.sequences) == (4, "held", True, 4)
    assert cell.tokens_per_second == pytest.approx(4.0), "the warm-up was a hundred times slower"
    assert cell.accepted_per_step == 2.0
    orders = [[variant for variant, _ in backend.log[i : i + 3]] for i in range(0, len(backend.log), 3)]
    assert len({tuple(order) for order in orders}) == 3, "no variant is always first"
    assert all(len({item for _, item in backend.log[i : i + 3]}) == 1 for i in range(0, len(backend.log), 3))


def test_a_noisy_cell_is_measured_again_up_to_a_limit() -> None:
    backend = FakeBatches(noisy)
    cell, _ = measure_cell(backend, SCENE, items(chat=4), EXTENT)
    assert cell.rounds == EXTENT.max_rounds and cell.verdict == "inconclusive"
    assert cell.noise is not None and cell.noise > 0.03


def test_noise_that_ends_is_not_waited_for_longer() -> None:
    backend = FakeBatches(lambda variant, number: noisy(variant, number) if number == 1 else 1.0)
    cell, _ = measure_cell(backend, SCENE, items(chat=4), replace(EXTENT, max_rounds=50))
    assert EXTENT.rounds < cell.rounds < 50 and cell.verdict == "held"


def test_a_different_output_is_found_in_any_variant() -> None:
    backend = FakeBatches(steady, lambda variant: (1, 3) if variant == "ngram, 4 tokens" else (1, 2))
    found = run(backend, [SCENE], {"chat": items(chat=4)}, EXTENT, ignore_progress, {})
    assert not found.same_text and exit_code(found) == 1
    assert found.cells[0].differing[0] == "chat-0 by ngram, 4 tokens"
    assert "NOT THE SAME TEXT: ngram, chat, T=0, batch 2: chat-0" in "\n".join(remarks(found))


def test_all_cells_and_what_they_come_to() -> None:
    seen: list[tuple[int, int, str]] = []
    grid_cells = [SCENE, replace(SCENE, task="code")]
    params = {"chat": items(chat=4), "code": items(code=4)}
    found = run(FakeBatches(steady), grid_cells, params, EXTENT, lambda *each: seen.append(each), {"model": "m"})
    assert exit_code(found) == 0
    reported = json.loads(json.dumps(found.as_json()))
    assert (reported["bench"], reported["model"], reported["verdict"], reported["same_text"]) == (
        "never-slower",
        "m",
        "held",
        True,
    )
    assert [each["drafter"] for each in reported["overall"]] == ["ngram", "all"]
    for each in (*reported["cells"], *reported["overall"]):
        assert each["speedup"] == pytest.approx(2.0) and each["accepted_per_step"] == 2.0
        assert each["speedup_interval"] == pytest.approx([2.0, 2.0]) and each["same_text"] is True
    assert reported["cells"][0]["best_fixed"] == 4 and reported["cells"][0]["bar"] == pytest.approx(0.93 / 0.52)
    assert seen[-1] == (2, 2, "done") and seen[0][2] == "chat, T=0, batch 2, ngram"
    row = ["chat", "0", "2", "ngram", "2.00", "4: 1.92", "1.79", "2.00 (2.00 to 2.00)", "held", "yes"]
    assert row in report_table(found).rows


def test_a_stop_leaves_the_rounds_that_were_finished() -> None:
    """Of each round there are three arms and two batches; the first is dropped. A single round after complete cells
    would say nothing of its own and spoil what they say."""
    params, grid_cells = {"chat": items(chat=4), "code": items(code=4)}, [SCENE, replace(SCENE, task="code")]
    cell = 6 * (1 + EXTENT.rounds)
    for writes, rounds in ((cell + 1, [3]), (cell + 6 * 3 - 1, [3]), (cell + 6 * 3, [3, 2]), (6 * 2 + 3, [1])):
        backend = FakeBatches(steady)
        backend.stop_after = writes
        found = run(backend, grid_cells, params, EXTENT, ignore_progress, {})
        assert isinstance(found.stopped, KeyboardInterrupt) and [cell.rounds for cell in found.cells] == rounds
        assert found.as_json()["complete"] is False and f"{rounds[-1]} rounds of its last cell" in remarks(found)[-1]
        assert all(cell.speedup == pytest.approx(2.0) and cell.same_text for cell in found.cells)
    backend.stop_after = len(backend.log) + 6 * 2 - 1
    with pytest.raises(KeyboardInterrupt):
        run(backend, grid_cells, params, EXTENT, ignore_progress, {})


def test_exit_codes_tell_a_failure_from_a_warning() -> None:
    cell, _ = measure_cell(FakeBatches(steady), SCENE, items(chat=4), EXTENT)

    def code(*cells: NeverSlowerCell) -> int:
        return exit_code(NeverSlowerResult({}, cells, ()))

    unsure, below = replace(cell, verdict="inconclusive"), replace(cell, verdict="slower")
    assert (code(cell), code(cell, unsure), code(unsure, below)) == (0, 4, 1)
    assert code(replace(unsure, same_text=False)) == 1


# The cells


def test_every_cell_that_is_promised() -> None:
    grid_cells = all_cells(["ngram", "suffix", "prediction", "model", "exit", "self"], 30)
    main = {(s.task, s.temperature, s.batch) for s in grid_cells if s.drafter == "useless"}
    assert len(main) == 21 and ("story", 1.5, 16) in main
    for drafter in ("ngram", "mix", "oracle"):
        assert {(s.task, s.temperature, s.batch) for s in grid_cells if s.drafter == drafter} == main
    others = {s.drafter: s.batch for s in grid_cells} | {"mix": 0}
    assert {name for name, batch in others.items() if batch == 1} == {"suffix", "exit:15", "self:int8", "self:int4"}
    assert [variant.speculation.drafter for variant in variants_to_load(grid_cells)][:3] == ["mix", "ngram", "suffix"]
    assert len(select_cells(grid_cells, ["chat"], ["mix"], [1, 4])) == 2


def test_prompts_of_a_batch_are_all_different() -> None:
    talk = [
        BenchPrompt(str(i), "chat", ({"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}))
        for i in "ab"
    ]
    found = variations(talk, 5)
    assert len({(item.id, str(item.messages)) for item in found}) == 5 and found[:2] == talk
    assert found[2].messages[-1]["content"].startswith("Hi") and found[2].messages[0] == talk[0].messages[0]
    assert with_min_tokens(talk[0], BenchSettings(max_tokens=8)).sampling == {"min_tokens": 8}


# Who stands before the bar


def text_of(prompt: tuple[int, ...], written: list[int]) -> Text:
    request = Request("r", prompt, SamplingParams(), 0, 64)
    return Text(0, request, [*prompt, *written])


def test_the_useless_drafter_is_always_wrong_and_takes_time() -> None:
    waits: list[float] = []
    truth = list(range(20))
    drafter = UselessDrafter({(1, 2): truth}, vocab=32, seconds=0.5, wait=waits.append)
    for written in range(16):
        (draft,) = drafter.propose([text_of((1, 2), truth[:written])], [Budget(4)])
        assert len(draft) == 4 and all(a != b for a, b in zip(draft.tokens, truth[written:], strict=False))
    assert waits == [2.0] * 16
    assert drafter.propose([text_of((1, 2), [])], [Budget(0)])[0].tokens == () and len(waits) == 16
    assert not drafter.traits.is_free, "it cannot be polled"


def test_the_oracle_errs_as_often_as_it_says() -> None:
    truth = [7] * 2000
    oracle = OracleDrafter({(1,): truth}, 32, ORACLE_ERROR_RATE)
    draft_tokens = [oracle.propose([text_of((1,), truth[:i])], [Budget(1)])[0].tokens[0] for i in range(2000)]
    assert sum(draft_token != 7 for draft_token in draft_tokens) / 2000 == pytest.approx(ORACLE_ERROR_RATE, abs=0.03)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_server_folder(tmp_path_factory.mktemp("models") / "roomy")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load_llm_for(variants_to_load([SCENE]), model=folder, quiet=True)


@pytest.fixture
def backend(folder: Path, llm: LLM) -> EngineBatchBackend:
    target = open_model(str(folder), EngineConfig(), no_progress)
    return EngineBatchBackend(llm, DrafterSlots(llm, target), BenchSettings(max_tokens=24, schemas=False))


def talks(count: int) -> list[BenchPrompt]:
    return [BenchPrompt(f"talk-{i}", "chat", ({"role": "user", "content": f"Hello {i}"},)) for i in range(count)]


def test_batches_run_together_with_the_same_output(backend: EngineBatchBackend, llm: LLM) -> None:
    ask = talks(2)
    (batch,) = backend.prepare(ask, 1.0, batch=4, batches=1)
    adaptive, fixed = adaptive_variant("ngram"), fixed_variants("oracle", [4])[4]
    useless = fixed_variants("useless", [4])[4]
    variants = [PLAIN, adaptive, fixed, useless]
    backend.reset(variants)
    found = {variant.name: backend.generate(variant, batch) for variant in variants}
    plain = found[PLAIN.name]
    assert len(plain.outputs) == 4 and all(len(text) >= 16 for text in plain.outputs)
    assert all(each.outputs == plain.outputs for each in found.values())
    assert plain.steps == plain.tokens == plain.timed_tokens + 4, "the first token of each belongs to its prompt"
    assert plain.tokens / found[fixed.name].steps > 2 and found[useless.name].steps == plain.tokens
    assert all(each.seconds > 0 and each.drafter_failures == 0 for each in found.values())
    alone = [llm.generate([list(job.prompt)], job.params)[0].outputs[0].token_ids for job in batch]
    assert list(plain.outputs) == alone


def test_controllers_stay_and_drafters_are_reset(backend: EngineBatchBackend, llm: LLM) -> None:
    backend.prepare(talks(1), 0.0, batch=1, batches=1)
    kept = []
    for _ in range(2):
        backend.reset([adaptive_variant("mix"), adaptive_variant("oracle")])
        for name in ("mix", "oracle"):
            backend._slots[adaptive_variant(name).name].activate()
            kept.append((llm.engine.controller, llm.engine.drafter.drafters.get("suffix", llm.engine.drafter)))
    (mix, suffix), (oracle, drafter), (mix_again, suffix_again), (oracle_again, drafter_again) = kept
    assert mix is mix_again and oracle is oracle_again and mix is not oracle
    assert suffix is not suffix_again and drafter is not drafter_again


def test_the_prompt_is_cached_and_what_does_not_fit_is_refused(backend: EngineBatchBackend, llm: LLM) -> None:
    (batch,) = backend.prepare(talks(1), 0.0, batch=1, batches=1)
    cached = llm.engine.stats.cached_prompt_tokens
    backend.generate(PLAIN, batch)
    assert llm.engine.stats.cached_prompt_tokens - cached >= len(batch[0].prompt) - 1 - llm.config.page_size
    with pytest.raises(RequestError, match="no prompt of chat that fits"):
        backend.prepare([BenchPrompt("long", "chat", ({"role": "user", "content": "word " * 2000},))], 0.0, 1, 1)


# The command


@pytest.fixture
def program_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))


def with_clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, int], float]) -> None:
    """Replace the times of real outputs."""
    write, count = EngineBatchBackend.generate, [0]

    def timed(self: EngineBatchBackend, variant: Variant, batch: Batch) -> BatchResult:
        count[0] += 1
        written = write(self, variant, batch)
        return replace(written, seconds=written.timed_tokens * seconds(variant.name, count[0]))

    monkeypatch.setattr(EngineBatchBackend, "generate", timed)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = program.main(["bench", "never-slower", "--quick", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("program_here")
def test_the_quick_form_holds_its_cells(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_clock(monkeypatch, lambda variant, _: 1.0)
    file = tmp_path / "result.json"
    code, reported = command(capsys, "--model", str(folder), "--max-tokens", "6", "--rounds", "2", "--out", str(file))
    assert code == 0 and reported["verdict"] == "held" and reported["complete"] is True
    assert json.loads(file.read_text()) == reported
    cells = [(cell["task"], cell["drafter"], cell["batch"]) for cell in reported["cells"]]
    wanted = [("edit", "ngram"), ("chat", "mix"), ("story", "useless")]
    assert cells == [(task, drafter, batch) for task, drafter in wanted for batch in (1, 4)]
    assert {cell["accepted_per_step"] for cell in reported["cells"] if cell["drafter"] == "useless"} == {1.0}
    assert [each["drafter"] for each in reported["overall"]] == ["ngram", "mix", "useless", "all"]
    assert reported["lengths"] == [0, 4] and reported["rounds"] == [2, 8] and "machine" in reported


@pytest.mark.usefixtures("program_here")
@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        (lambda variant, _: 1.1 if "adaptive" in variant else 1.0, 1),
        (lambda variant, count: 1.0 + 0.3 * (count * 7 % 5), 4),
    ],
    ids=["below", "noisy"],
)
def test_how_the_command_ends(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[str, int], float],
    code: int,
) -> None:
    with_clock(monkeypatch, seconds)
    cells = ("--drafters", "ngram", "--batches", "1", "--max-tokens", "4", "--rounds", "2", "--most-rounds", "3")
    found, reported = command(capsys, "--model", str(folder), *cells)
    assert found == code and reported["verdict"] == {1: "slower", 4: "inconclusive"}[code]


# Step costs are not measured first, which takes longest, and each cell is reported.
WITHOUT_PROFILE = """
import sys
from foretell.cli import bench_common
from foretell.cli.main import main
from foretell.llm import LLM

bench_common.LINE_SECONDS = 0.0
LLM.measure = lambda self: None
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_that_is_ended_by_a_timeout_reports_what_it_has(folder: Path) -> None:
    words = ["bench", "never-slower", "--model", str(folder), "--drafters", "ngram", "--max-tokens", "6", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_PROFILE, *words, "--rounds", "1", "--most-rounds", "1"],
        stdout=PIPE, stderr=PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None and process.stdout is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("[1/"):
                process.terminate()
        reported = json.loads(process.stdout.read())
    assert process.returncode == 130 and seen[-1] == "foretell: stopped\n"
    assert (
        reported["complete"] is False and reported["cells"] and all(cell["rounds"] == 1 for cell in reported["cells"])
    )


@pytest.mark.usefixtures("program_here")
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(LLM, "__init__", load)
    for words, message in [
        (["--drafters", "orakel"], "did you mean 'oracle'"),
        (["--tasks", "cod"], "did you mean 'code'"),
        (["--batches", "3"], "has no '3'"),
        (["--drafters", "exit:1", "--batches", "16"], "leave no cell to measure"),
        (["--max-tokens", "1"], "must be 2 or more"),
        (["--rounds", "5", "--most-rounds", "4"], "must be 1 to 4"),
    ]:
        assert program.main(["bench", "never-slower", "--model", str(folder), *words]) == 2
        assert message in capsys.readouterr().err, words
