"""Who writes when: arms take turns, nothing is learnt from one round to the next, nothing is lost when it stops."""

from __future__ import annotations

import io

import pytest

from foretell.bench.measure import PLAIN, Sample, TimedOutput, measure, rotated
from foretell.bench.plan import Plan
from foretell.bench.progress import QUIET, Progress
from foretell.bench.prompt import BenchPrompt
from foretell.bench.run import BenchJob, run
from foretell.errors import RequestError

from .fakes import TEXT, FakeStage, arms, items, watch_nothing

ONCE = Plan(rounds=1, temperatures=(0.0,))


def test_arms_rotate() -> None:
    assert [rotated("ABC", i) for i in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]


def test_nobody_is_always_first() -> None:
    stage = FakeStage()
    measure(stage, arms("a", "b", "c"), items(task=3), Plan(rounds=3), [], watch_nothing)
    order = [arm for arm, _ in stage.log]
    passes = [order[i : i + 9] for i in (0, 9, 18)]
    assert passes == [list("abcbcacab"), list("bcacababc"), list("cababcbca")]
    firsts = [[item for arm, item in stage.log[i::3] if arm == "a"] for i in range(3)]
    assert all(len(set(each)) == 3 for each in firsts), "each text has each arm once in each place"


def test_arms_are_made_anew_for_every_pass_over_the_items() -> None:
    stage = FakeStage()
    measure(stage, arms("a", "b"), items(task=2), Plan(temperatures=(0.0, 1.0), rounds=2), [], watch_nothing)
    assert stage.refreshed == [0, 4, 8, 12], "a drafter that remembers texts must not meet one again"


def test_every_turn_is_written_and_progress_is_told() -> None:
    seen: list[tuple[int, int, str]] = []
    samples: list[Sample] = []
    talk = [BenchPrompt("talk", "chat", turns=("and then?",)), BenchPrompt("other", "code")]
    measure(FakeStage(), arms("a"), talk, ONCE, samples, lambda *each: seen.append(each))
    assert [(each.job.item, each.job.turn) for each in samples] == [("talk", 0), ("talk", 1), ("other", 0)]
    assert seen == [(0, 2, "chat, round 1"), (1, 2, "code, round 1"), (2, 2, "done")]


def test_a_prediction_is_only_measured_where_there_is_one() -> None:
    stage = FakeStage()
    asked = [BenchPrompt("edit", "edit", prediction="text"), BenchPrompt("chat", "chat")]
    measure(stage, arms("ngram", "prediction"), asked, ONCE, [], watch_nothing)
    assert stage.log == [("ngram", "edit"), ("prediction", "edit"), ("ngram", "chat")]


def test_what_was_finished_survives_a_stop() -> None:
    stage = FakeStage()
    stage.stop_after = 5
    done = run(BenchJob("bench", arms("a"), items(code=2, chat=2), ONCE), stage, watch_nothing)
    assert isinstance(done.stopped, KeyboardInterrupt)
    assert not done.result.complete
    assert [cell.task for cell in done.result.cells] == ["code"], "half a pair is no pair"
    assert done.result.cells[0].texts == 2


def test_a_stop_before_anything_was_found_goes_on_at_once() -> None:
    stage = FakeStage()
    stage.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(BenchJob("bench", arms("a"), items(code=1), ONCE), stage, watch_nothing)


def test_what_does_not_fit_is_left_out_and_named() -> None:
    stage = FakeStage()
    stage.too_long = {"code-1"}
    result = run(BenchJob("bench", arms("a"), items(code=2), ONCE), stage, watch_nothing).result
    assert result.left_out == ("code-1",)
    assert {item for _, item in stage.log} == {"code-0"}
    stage.too_long = {"code-0", "code-1"}
    with pytest.raises(RequestError, match="no prompt that fits"):
        run(BenchJob("bench", arms("a"), items(code=2), ONCE), stage, watch_nothing)


def test_plain_decoding_is_always_among_the_arms() -> None:
    stage = FakeStage()
    run(BenchJob("bench", arms("a"), items(code=1), ONCE), stage, watch_nothing)
    assert [arm for arm, _ in stage.log] == [PLAIN.name, "a"]


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"per_task": 0}, {"max_tokens": 0}, {"temperatures": (-1.0,)}])
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        Plan(**settings)  # type: ignore[arg-type]


def test_the_first_token_is_the_prompts() -> None:
    assert TimedOutput(TEXT, 11, decoding=5.0, whole=9.0, drafting=0.0, running=0.0).a_token == 0.5
    assert TimedOutput((1,), 1, decoding=0.0, whole=1.0, drafting=0.0, running=0.0).a_token is None


def test_progress_is_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), 0.0
    progress = Progress(stream, lambda: now)
    for done in range(5):
        progress(done, 4, "writing")
        now += QUIET * 0.6
    assert stream.getvalue().splitlines() == [
        "[0/4] writing",
        "[2/4] writing, about 12 s left",
        "[4/4] writing",
    ]
