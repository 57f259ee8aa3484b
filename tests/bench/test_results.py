"""What is made of samples: ratios, shares, and whether the text stayed the same."""

from __future__ import annotations

import json

import pytest

from foretell.bench.measure import MeasureJob
from foretell.bench.report import remarks, report_table
from foretell.bench.results import BenchResult, TaskCell
from foretell.bench.run import BenchJob, run
from foretell.bench.settings import QUICK_DRAFTERS, QUICK_OFFLINE, BenchSettings

from .fakes import TEXT, FakeBackend, ignore_progress, items, variants

FIELDS = {"speedup", "speedup_interval", "accepted_per_step", "same_text"}


def measured(
    backend: FakeBackend,
    names: tuple[str, ...] = ("a",),
    settings: BenchSettings = BenchSettings(temperatures=(0.0,)),
    **tasks: int,
) -> BenchResult:
    return run(
        BenchJob("bench", variants(*names), items(**(tasks or {"code": 3})), settings), backend, ignore_progress
    ).result


def halved(variant: str, job: MeasureJob, time: int) -> float:
    """Twice as fast as plain, and once very slow."""
    return 1.0 if variant == "plain" else 50.0 if time == 1 and job.prompt_id == "code-0" else 0.5


def test_the_ratio_is_the_median_of_pairs() -> None:
    (cell,) = measured(FakeBackend(halved)).cells
    assert cell.speedup == pytest.approx(2.0)
    assert (cell.sequences, cell.tokens, cell.tasks) == (3, 9 * len(TEXT), 1)
    assert cell.tokens_per_second == pytest.approx(2.0)
    assert cell.plain_tokens_per_second == pytest.approx(1.0)


def test_a_drift_of_the_machine_cancels_within_pairs() -> None:
    def slowing(variant: str, job: MeasureJob, time: int) -> float:
        return (1.0 if variant == "plain" else 0.8) * (1 + 3 * time)

    (cell,) = measured(FakeBackend(slowing)).cells
    assert cell.speedup == pytest.approx(1.25)
    assert cell.noise == pytest.approx(0.0)


def test_noise_is_reported() -> None:
    def unsteady(variant: str, job: MeasureJob, time: int) -> float:
        return 1.0 if variant == "plain" else 0.5 * (1.0, 1.1, 0.9)[time]

    (cell,) = measured(FakeBackend(unsteady)).cells
    assert cell.noise is not None and cell.noise == pytest.approx(0.244, abs=0.001), "the t interval of three rounds"
    assert cell.speedup_interval is not None
    assert cell.speedup_interval[0] < 2.0 < cell.speedup_interval[1]


@pytest.mark.parametrize("shared", [True, False])
def test_noise_of_a_mean_averages_out_only_where_tasks_do_not_share_it(shared: bool) -> None:
    def unsteady(variant: str, job: MeasureJob, time: int) -> float:
        shift = 0 if shared else sum(map(ord, str(job.prompt_id)))
        return 1.0 if variant == "plain" else 0.5 * (1.0, 1.1, 0.9)[(time + shift) % 3]

    result = measured(FakeBackend(unsteady), a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1)
    (overall,) = result.overall
    least = min(cell.noise or 0.0 for cell in result.cells)
    assert overall.noise is not None and (overall.noise < 0.7 * least) != shared
    assert not shared or overall.noise == pytest.approx(least)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    (cell,) = measured(FakeBackend(halved), settings=BenchSettings(rounds=1), chat=1).cells
    assert cell.speedup == pytest.approx(2.0)
    assert cell.speedup_interval is None and cell.noise is None


def test_steps_and_shares_of_time() -> None:
    (cell,) = measured(FakeBackend(steps=4), settings=BenchSettings(rounds=1), code=1).cells
    assert cell.accepted_per_step == pytest.approx(11 / 4)
    assert cell.steps_over_plain == pytest.approx(4 / 11)
    assert cell.time == pytest.approx({"drafting": 2.5 / 11, "running": 5 / 11, "rest": 3.5 / 11})


def test_each_task_counts_the_same_over_all() -> None:
    def by_task(variant: str, job: MeasureJob, time: int) -> float:
        return 1.0 if variant == "plain" or job.task == "chat" else 0.25

    result = measured(FakeBackend(by_task), code=2, chat=9)
    (overall,) = result.overall
    assert overall.speedup == pytest.approx(2.0), "the geometric mean of 4 and 1, not of eleven outputs"
    assert (overall.task, overall.tasks, overall.sequences) == ("all", 2, 11)
    assert overall.speedup_interval == pytest.approx((2.0, 2.0))


def test_a_different_output_is_found_and_named() -> None:
    def changed(variant: str, job: MeasureJob) -> tuple[int, ...]:
        return (*TEXT[:-1], 99) if (variant, job.prompt_id) == ("b", "chat-1") else TEXT

    result = measured(FakeBackend(tokens=changed), ("a", "b"), code=1, chat=2)
    assert not result.same_text
    wrong = [cell for cell in result.cells if cell.same_text is False]
    assert [(cell.task, cell.variant, cell.differing) for cell in wrong] == [("chat", "b", ("chat-1, turn 1",))]
    assert [cell.same_text for cell in result.overall] == [True, False]
    assert any("NOT THE SAME TEXT: b, chat, T=0: chat-1, turn 1." in line for line in remarks(result))
    assert [row[-1] for row in report_table(result).rows].count("NO") == 2


def test_an_output_too_short_to_time_still_counts_its_steps() -> None:
    (cell,) = measured(FakeBackend(tokens=lambda variant, job: (7,), steps=1), code=1).cells
    assert (cell.speedup, cell.speedup_interval, cell.accepted_per_step) == (None, None, 1.0)


def test_variants_keep_the_order_of_their_names() -> None:
    result = measured(FakeBackend(), ("b", "a", "c"), code=2, chat=2)
    assert [(cell.task, cell.variant) for cell in result.cells] == [
        (task, variant) for task in ("code", "chat") for variant in ("b", "a", "c")
    ]


def test_the_json_has_its_fields_for_each_cell_and_over_all() -> None:
    result = measured(FakeBackend(halved), settings=BenchSettings(temperatures=(0.0, 1.0), rounds=2), code=2, chat=2)
    reported = json.loads(json.dumps(result.as_json()))
    assert reported["bench"] == "bench" and reported["complete"] is True and reported["same_text"] is True
    assert len(reported["cells"]) == 4 and len(reported["overall"]) == 2
    for cell in (*reported["cells"], *reported["overall"]):
        assert set(cell) >= FIELDS
        low, high = cell["speedup_interval"]
        assert low <= cell["speedup"] <= high


def test_the_table_has_a_row_for_each_temperature() -> None:
    result = measured(FakeBackend(halved), ("a",), BenchSettings(temperatures=(0.0, 1.0), rounds=2), code=1)
    table = report_table(result)
    assert list(table.head[:4]) == ["task", "T", "drafter", "accepted per step"] and table.words == 3
    names = [["code", "0", "a"], ["code", "1", "a"], ["mean of 1", "0", "a"], ["mean of 1", "1", "a"]]
    assert [row[:3] for row in table.rows] == names
    assert {len(row) for row in table.rows} == {len(table.head)}
    assert [row[-3] for row in table.rows] == ["2.00x faster", "0.20x slower"] * 2
    assert all(row[3] == "1.00" and row[-1] == "yes" for row in table.rows)


def test_a_promise_that_was_not_made_is_not_broken() -> None:
    from dataclasses import replace

    from foretell.bench.results import OutputPair

    backend = FakeBackend()
    job = backend.prepare(items(code=1)[0], 1.0, BenchSettings())[0]
    plain, other = (backend.generate(variant, job) for variant in variants("plain", "a"))
    other = replace(other, tokens=(1, 2, 3))
    assert OutputPair(("x", 0), plain, other).same is False
    assert OutputPair(("x", 0), plain, replace(other, must_match=False)).same is None


def test_a_run_that_was_stopped_says_so() -> None:
    result = BenchResult("bench", {}, (), (), complete=False)
    assert remarks(result)[-1].startswith("Stopped early")
    assert result.as_json()["complete"] is False


def test_a_failing_drafter_is_reported() -> None:
    from dataclasses import replace

    result = measured(FakeBackend())
    failed: tuple[TaskCell, ...] = (replace(result.overall[0], drafter_failures=3),)
    assert any("a FAILED in 3 steps" in line for line in remarks(replace(result, overall=failed)))
    assert not any("FAILED" in line for line in remarks(result))


def test_short_outputs_are_said_to_understate_the_speedup() -> None:
    def noted(limit: int | None) -> bool:
        result = BenchResult("bench", {"max_tokens": limit}, (), ())
        return any("understate the speedup of longer ones" in line for line in remarks(result))

    assert noted(24) and not noted(128) and not noted(None)
    assert not noted(QUICK_OFFLINE.max_tokens) and noted(QUICK_DRAFTERS.max_tokens)


def test_an_interval_of_few_prompts_is_said_to_be_wide() -> None:
    def seconds(variant: str, job: MeasureJob, time: int) -> float:
        return 1.0 if variant == "plain" else {"code-0": 0.2, "code-1": 0.9}[job.prompt_id]

    result = measured(FakeBackend(seconds), ("a",), BenchSettings(temperatures=(0.0,), rounds=1), code=2)
    assert [row[-2] for row in report_table(result).rows] == ["wide", "wide"]
    assert any("raise --per-task" in line for line in remarks(result))
    assert not any("raise --per-task" in line for line in remarks(measured(FakeBackend(), code=2)))
