"""Batches of prompts, their metrics and their transcripts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
from foretell.bench.engine_backend import EngineBackend
from foretell.bench.measure import (
    PLAIN,
    MeasureJob,
    TimedOutput,
    Variant,
    make_batches,
    measure,
    merge_turns,
    rephrase,
    variant_grid,
    variants_of,
)
from foretell.bench.metrics import CURVE_POINTS, AcceptanceByDepth, Latency, token_times
from foretell.bench.prompt import BenchPrompt
from foretell.bench.report import brief, report_table
from foretell.bench.results import BenchResult, read_result, result_from_json
from foretell.bench.run import BenchJob, run
from foretell.bench.settings import BenchSettings
from foretell.bench.transcripts import transcripts_of
from foretell.build.model_source import no_progress, open_model
from foretell.cli.bench_common import WIDTH, ProgressBar, bar
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams

from .fakes import TEXT, FakeBackend, ignore_progress, items, variants

BOTH = BenchSettings(rounds=2, temperatures=(0.0,), batches=(1, 4))


def test_a_batch_has_different_prompts_of_one_task() -> None:
    params = [
        *(BenchPrompt(f"code-{i}", "code", ({"role": "user", "content": f"{i}"},)) for i in range(5)),
        BenchPrompt("go-on", "text", text="Once"),
    ]
    found = make_batches(params, 4, BenchSettings(max_tokens=8))
    assert [[item.task for item in pack] for pack in found] == [["code"] * 4] * 2 + [["text"] * 4]
    said = [item.text or item.messages[-1]["content"] for pack in found for item in pack]
    assert len(set(said)) == 12 and len({item.id for pack in found for item in pack}) == 12
    assert all(item.sampling == {"min_tokens": 8} for pack in found for item in pack), "none ends at once"
    assert make_batches(params, 1, BenchSettings()) == [[item] for item in params], "alone each is as it is"
    assert rephrase(params[0], 0) is params[0]


def test_equal_turns_of_conversations_are_one_batch() -> None:
    one, two = (
        [MeasureJob(name, "chat", turn, (1,), SamplingParams()) for turn in range(turns)]
        for name, turns in (("a", 2), ("b", 1))
    )
    first, second = merge_turns([one, two])
    assert [job.prompt_id for job in first.jobs] == ["a", "b"] and first.batch_size == 2
    assert [job.prompt_id for job in second.jobs] == ["a"] and second.turn == 1


def test_every_batch_size_is_a_pass_of_its_own() -> None:
    backend = FakeBackend()
    result = run(BenchJob("bench", variants("a"), items(code=4, chat=4), BOTH), backend, ignore_progress).result
    assert len(backend.refreshed) == 4, "variants are reset for each"
    cells = [(cell.task, cell.batch, cell.sequences) for cell in result.cells]
    assert cells == [("code", 1, 4), ("code", 4, 4), ("chat", 1, 4), ("chat", 4, 4)]
    assert [(cell.batch, cell.sequences) for cell in result.overall] == [(1, 8), (4, 8)]
    table = report_table(result)
    assert list(table.head[:3]) == ["task", "batch", "drafter"] and table.rows[0][:3] == ["code", "1", "a"]


def test_time_per_token_of_a_batch_counts_the_timed_tokens() -> None:
    assert TimedOutput(TEXT, 11, 5.0, 9.0, 0.0, 0.0, timed_tokens=20).seconds_per_token == 0.25
    assert TimedOutput(TEXT, 11, 5.0, 9.0, 0.0, 0.0, timed_tokens=0).seconds_per_token is None


def test_acceptance_is_counted_by_draft_depth() -> None:
    by_depth = AcceptanceByDepth.counted({(3, 1): 2, (1, 1): 5, (2, 0): 1})
    assert (by_depth.reached, by_depth.accepted) == ((8, 3, 2), (7,))
    assert by_depth.rates == (7 / 8, 0.0, 0.0)
    assert (
        AcceptanceByDepth.total([by_depth, AcceptanceByDepth((1,), (1,))]).reached == (9, 3, 2)
        and AcceptanceByDepth().rates == ()
    )


def test_waits_are_those_of_tokens_and_not_of_steps() -> None:
    times = token_times([(0.4, 4), (0.2, 1)])
    assert times == pytest.approx([0.1] * 4 + [0.2])
    wait = Latency.of(times)
    assert wait is not None and (wait.count, wait.p50, wait.p99) == (5, pytest.approx(0.1), pytest.approx(0.2))
    assert len(wait.curve) == CURVE_POINTS and wait.curve == tuple(sorted(wait.curve))
    assert Latency.of([]) is None


def test_a_grid_has_every_drafter_with_every_length() -> None:
    base = SpeculationConfig(rule="block")
    found = variant_grid(["ngram", "ngram+suffix"], [None, 4], base)
    reported = [
        (variant.name, variant.speculation.drafter, variant.speculation.num_speculative_tokens) for variant in found
    ]
    assert reported == [
        ("ngram, adaptive", "ngram", None),
        ("ngram, 4 tokens", "ngram", 4),
        ("ngram+suffix, adaptive", "ngram,suffix", None),
        ("ngram+suffix, 4 tokens", "ngram,suffix", 4),
    ]
    assert [variant.name for variant in variant_grid(["auto"], [None], base)] == ["auto"]
    assert variant_grid(["auto"], [4], base)[0].speculation.num_speculative_tokens == 4, "as it was asked for"
    for names, nodes in ((["none"], [None]), (["ngram"], [0]), ([], [None])):
        with pytest.raises(RequestError, match="drafts"):
            variant_grid(names, nodes, base)


# Transcripts


class BackendWithOrigins(FakeBackend):
    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        written = super().generate(variant, job)
        tokens = written.tokens * job.batch_size
        origins = tuple("ngram" if token in (1, 2) and variant != PLAIN else "target" for token in tokens)
        return replace(written, tokens=tokens, origins=origins, lengths=(len(TEXT),) * job.batch_size)


@pytest.mark.parametrize("batch", [1, 2])
def test_transcripts_keep_the_drafter_of_each_token(batch: int) -> None:
    samples: list[object] = []
    settings = BenchSettings(rounds=2, batches=(batch,), temperatures=(0.0,))
    measure(BackendWithOrigins(), [PLAIN, *variants("b", "a")], items(code=2), settings, samples, ignore_progress)  # type: ignore[arg-type]
    found = transcripts_of(samples, BackendWithOrigins().decode)  # type: ignore[arg-type]
    assert [record.prompt_id for record in found] == ["code-0", "code-1"]
    for record in found:
        assert [version.variant for version in record.versions] == ["plain", "b", "a"] and record.prompt == "<1>"
        _, other, _ = record.versions
        assert other.runs[:3] == (
            ("target", "<0>"),
            ("ngram", "<1><2>"),
            ("target", "".join(f"<{i}>" for i in range(3, 11))),
        )
        assert (other.tokens, other.drafted, other.same, record.versions[0].same) == (11, 2, True, None)


# What is kept


def measured() -> BenchResult:
    facts = {"model": "m", "machine": {"cores": 2}}
    return run(
        BenchJob("offline", variants("a"), items(code=4), BOTH, facts), FakeBackend(steps=4), ignore_progress
    ).result


def test_a_stored_run_is_read_back_whole(tmp_path: Path) -> None:
    result = measured()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(result.as_json()))
    assert read_result(path) == replace(result, transcripts=())
    assert result_from_json(result.as_json()).as_json() == result.as_json()


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for text, words in [
        (None, "there is no"),
        ("{", "is not JSON"),
        ('{"bench": "load"}', "is not a result of bench offline"),
    ]:
        path = tmp_path / "run.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(RequestError, match=words):
            read_result(path)


def test_the_last_line_is_short() -> None:
    reported = brief(measured().as_json())
    assert (
        reported["bench"] == "offline"
        and reported["model"] == "m"
        and reported["complete"] is True
        and "speedup" not in reported
    )
    assert set(reported["cells"][0]) >= {
        "task",
        "arm",
        "batch",
        "speedup",
        "speedup_interval",
        "accepted_per_step",
        "same_text",
    }
    assert "token_seconds" not in reported["cells"][0] and reported["cells"][0]["accepted_per_step"] == 2.75
    one = brief({**measured().as_json(), "overall": [{"speedup": 1.23456789, "speedup_interval": [1.0, 2.0]}]})
    assert one["speedup"] == 1.235 and one["speedup_interval"] == [1.0, 2.0]


# A bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar() -> None:
    stream, now = Terminal(), 0.0
    progress = ProgressBar(stream, lambda: now)
    progress(0, 2, "writing")
    now = 3.0
    progress(1, 2, "writing")
    progress(2, 2, "done")
    text = stream.getvalue()
    lines = text.removeprefix("\x1b[K").split("\r\x1b[K")
    assert (
        text.startswith("\x1b[K")
        and lines[1] == f"{'█' * 12}{'░' * 12} [1/2] writing, about 3 s left"
        and lines[2].endswith("done\n")
    )
    assert [len(bar(done, 7)) for done in range(8)] == [WIDTH] * 8 and bar(7, 7) == "█" * WIDTH


# The engine


def test_outputs_of_a_batch_equal_those_of_single_requests(tiny_folder: Path) -> None:
    (variant,) = variants_of(["ngram"], [4], SpeculationConfig())
    llm = load_llm_for([variant], model=tiny_folder, quiet=True)
    backend = EngineBackend(llm, DrafterSlots(llm, open_model(str(tiny_folder), EngineConfig(), no_progress)))
    fox = "The quick brown fox. The quick"
    params = [BenchPrompt(f"fox-{i}", "copy", text=f"{i} {fox}", sampling={"ignore_eos": True}) for i in range(3)]
    settings = BenchSettings(max_tokens=12)
    backend.reset([PLAIN, variant])
    jobs = [backend.prepare(item, 0.0, settings)[0] for item in params]
    alone = [backend.generate(PLAIN, job) for job in jobs]
    batched = backend.generate(variant, replace(jobs[0], others=tuple(jobs[1:])))
    assert batched.tokens == tuple(token for written in alone for token in written.tokens)
    assert batched.lengths == (12, 12, 12) and batched.timed_tokens is not None and 30 <= batched.timed_tokens <= 33
    assert sum(count for _, count in batched.step_times) == batched.timed_tokens
    assert sum(seconds for seconds, _ in batched.step_times) >= batched.decode_seconds > 0
    assert len(batched.origins) == 36 and sum(batched.acceptance.accepted) == batched.origins.count("ngram")
    assert 0 < batched.steps <= 36 and batched.must_match and batched.total_seconds >= batched.decode_seconds
    assert "".join(backend.decode(jobs[0].prompt)).endswith(fox)
