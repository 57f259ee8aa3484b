"""Who writes when: arms take turns, nothing is learnt from one round to the next, nothing is lost when it stops."""

from __future__ import annotations

import io

import pytest

from foretell.bench.measure import PLAIN, Sample, TimedOutput, measure, rotated
from foretell.bench.prompt import BenchPrompt
from foretell.bench.run import BenchJob, run
from foretell.bench.settings import BenchSettings
from foretell.cli.bench_common import LINE_SECONDS, ProgressBar
from foretell.errors import RequestError

from .fakes import TEXT, FakeBackend, ignore_progress, items, variants

ONCE = BenchSettings(rounds=1, temperatures=(0.0,))


def test_variants_rotate() -> None:
    assert [rotated("ABC", i) for i in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]


def test_no_variant_is_always_first() -> None:
    backend = FakeBackend()
    measure(backend, variants("a", "b", "c"), items(task=3), BenchSettings(rounds=3), [], ignore_progress)
    order = [variant for variant, _ in backend.log]
    passes = [order[i : i + 9] for i in (0, 9, 18)]
    assert passes == [list("abcbcacab"), list("bcacababc"), list("cababcbca")]
    firsts = [[item for variant, item in backend.log[i::3] if variant == "a"] for i in range(3)]
    assert all(len(set(each)) == 3 for each in firsts), "each text has each arm once in each place"


def test_variants_are_reset_for_every_pass_over_the_items() -> None:
    backend = FakeBackend()
    measure(
        backend,
        variants("a", "b"),
        items(task=2),
        BenchSettings(temperatures=(0.0, 1.0), rounds=2),
        [],
        ignore_progress,
    )
    assert backend.refreshed == [0, 4, 8, 12], "a drafter that remembers sequences must not see one again"


def test_every_turn_is_generated_and_progress_is_reported() -> None:
    seen: list[tuple[int, int, str]] = []
    samples: list[Sample] = []
    talk = [BenchPrompt("talk", "chat", turns=("and then?",)), BenchPrompt("other", "code")]
    measure(FakeBackend(), variants("a"), talk, ONCE, samples, lambda *each: seen.append(each))
    assert [(each.job.prompt_id, each.job.turn) for each in samples] == [("talk", 0), ("talk", 1), ("other", 0)]
    assert seen == [(0, 2, "chat, round 1"), (1, 2, "code, round 1"), (2, 2, "done")]


def test_a_prediction_is_only_measured_where_there_is_one() -> None:
    backend = FakeBackend()
    params = [BenchPrompt("edit", "edit", prediction="text"), BenchPrompt("chat", "chat")]
    measure(backend, variants("ngram", "prediction"), params, ONCE, [], ignore_progress)
    assert backend.log == [("ngram", "edit"), ("prediction", "edit"), ("ngram", "chat")]


def test_what_was_finished_survives_a_stop() -> None:
    backend = FakeBackend()
    backend.stop_after = 5
    done = run(BenchJob("bench", variants("a"), items(code=2, chat=2), ONCE), backend, ignore_progress)
    assert isinstance(done.stopped, KeyboardInterrupt)
    assert not done.result.complete
    assert [cell.task for cell in done.result.cells] == ["code"], "half a pair is no pair"
    assert done.result.cells[0].sequences == 2


def test_a_stop_before_anything_was_found_goes_on_at_once() -> None:
    backend = FakeBackend()
    backend.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(BenchJob("bench", variants("a"), items(code=1), ONCE), backend, ignore_progress)


def test_what_does_not_fit_is_left_out_and_named() -> None:
    backend = FakeBackend()
    backend.too_long = {"code-1"}
    result = run(BenchJob("bench", variants("a"), items(code=2), ONCE), backend, ignore_progress).result
    assert result.left_out == ("code-1",)
    assert {item for _, item in backend.log} == {"code-0"}
    backend.too_long = {"code-0", "code-1"}
    with pytest.raises(RequestError, match="no prompt that fits"):
        run(BenchJob("bench", variants("a"), items(code=2), ONCE), backend, ignore_progress)


def test_plain_decoding_is_always_a_variant() -> None:
    backend = FakeBackend()
    run(BenchJob("bench", variants("a"), items(code=1), ONCE), backend, ignore_progress)
    assert [variant for variant, _ in backend.log] == [PLAIN.name, "a"]


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"per_task": 0}, {"max_tokens": 0}, {"temperatures": (-1.0,)}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        BenchSettings(**settings)  # type: ignore[arg-type]


def test_the_first_token_is_the_prompts() -> None:
    assert (
        TimedOutput(
            TEXT, 11, decode_seconds=5.0, total_seconds=9.0, draft_seconds=0.0, target_seconds=0.0
        ).seconds_per_token
        == 0.5
    )
    assert (
        TimedOutput(
            (1,), 1, decode_seconds=0.0, total_seconds=1.0, draft_seconds=0.0, target_seconds=0.0
        ).seconds_per_token
        is None
    )


def test_progress_is_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressBar(stream, lambda: now)
    for done in range(5):
        progress(done, 4, "writing")
        now += LINE_SECONDS * 0.6
    assert stream.getvalue().splitlines() == [
        "[0/4] writing",
        "[2/4] writing, about 12 s left",
        "[4/4] writing",
    ]
