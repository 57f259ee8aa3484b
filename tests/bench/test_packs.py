"""Texts written at once: who stands beside whom, and what is counted of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.bench.drafter_slots import DrafterSlots, open_with
from foretell.bench.engine_backend import EngineBackend
from foretell.bench.latency import CURVE, AcceptanceByDepth, Latency, token_times
from foretell.bench.measure import (
    PLAIN,
    MeasureJob,
    TimedOutput,
    Variant,
    again,
    arms_of,
    grid_of,
    measure,
    packs,
    side_by_side,
)
from foretell.bench.plan import Plan
from foretell.bench.progress import WIDTH, Progress, bar
from foretell.bench.prompt import BenchPrompt
from foretell.bench.report import brief, markdown
from foretell.bench.results import Result, read_result, result_from_json
from foretell.bench.run import BenchJob, run
from foretell.bench.transcripts import records
from foretell.build.model_source import no_progress, open_model
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams

from .fakes import TEXT, FakeStage, arms, items, watch_nothing

BOTH = Plan(rounds=2, temperatures=(0.0,), batches=(1, 4))


def test_a_pack_has_texts_of_one_task_and_no_two_alike() -> None:
    asked = [
        *(BenchPrompt(f"code-{i}", "code", ({"role": "user", "content": f"{i}"},)) for i in range(5)),
        BenchPrompt("go-on", "text", text="Once"),
    ]
    found = packs(asked, 4, Plan(max_tokens=8))
    assert [[item.task for item in pack] for pack in found] == [["code"] * 4] * 2 + [["text"] * 4]
    said = [item.text or item.messages[-1]["content"] for pack in found for item in pack]
    assert len(set(said)) == 12 and len({item.id for pack in found for item in pack}) == 12
    assert all(item.sampling == {"min_tokens": 8} for pack in found for item in pack), "none ends at once"
    assert packs(asked, 1, Plan()) == [[item] for item in asked], "alone each is as it is"
    assert again(asked[0], 0) is asked[0]


def test_turns_stand_beside_turns() -> None:
    one, two = (
        [MeasureJob(name, "chat", turn, (1,), SamplingParams()) for turn in range(turns)]
        for name, turns in (("a", 2), ("b", 1))
    )
    first, second = side_by_side([one, two])
    assert [job.item for job in first.all] == ["a", "b"] and first.batch == 2
    assert [job.item for job in second.all] == ["a"] and second.turn == 1


def test_every_batch_size_is_a_pass_of_its_own() -> None:
    stage = FakeStage()
    result = run(BenchJob("bench", arms("a"), items(code=4, chat=4), BOTH), stage, watch_nothing).result
    assert len(stage.refreshed) == 4, "arms are made anew for each"
    cells = [(cell.task, cell.batch, cell.texts) for cell in result.cells]
    assert cells == [("code", 1, 4), ("code", 4, 4), ("chat", 1, 4), ("chat", 4, 4)]
    assert [(cell.batch, cell.texts) for cell in result.overall] == [(1, 8), (4, 8)]
    head, _, row, *_ = markdown(result).splitlines()
    assert head.startswith("| task | at once | drafter |") and row.startswith("| code | 1 | a |")


def test_the_clock_of_several_texts_knows_how_many_tokens_it_saw() -> None:
    assert TimedOutput(TEXT, 11, 5.0, 9.0, 0.0, 0.0, timed=20).a_token == 0.25
    assert TimedOutput(TEXT, 11, 5.0, 9.0, 0.0, 0.0, timed=0).a_token is None


def test_places_are_counted_by_how_far_drafts_went() -> None:
    places = AcceptanceByDepth.counted({(3, 1): 2, (1, 1): 5, (2, 0): 1})
    assert (places.reached, places.stood) == ((8, 3, 2), (7,))
    assert places.shares == (7 / 8, 0.0, 0.0)
    assert (
        AcceptanceByDepth.total([places, AcceptanceByDepth((1,), (1,))]).reached == (9, 3, 2)
        and AcceptanceByDepth().shares == ()
    )


def test_waits_are_those_of_tokens_and_not_of_steps() -> None:
    times = token_times([(0.4, 4), (0.2, 1)])
    assert times == pytest.approx([0.1] * 4 + [0.2])
    wait = Latency.of(times)
    assert wait is not None and (wait.count, wait.p50, wait.p99) == (5, pytest.approx(0.1), pytest.approx(0.2))
    assert len(wait.curve) == CURVE and wait.curve == tuple(sorted(wait.curve))
    assert Latency.of([]) is None


def test_a_grid_has_every_drafter_with_every_length() -> None:
    base = SpeculationConfig(rule="block")
    found = grid_of(["ngram", "ngram+suffix"], [None, 4], base)
    told = [(arm.name, arm.speculation.drafter, arm.speculation.num_speculative_tokens) for arm in found]
    assert told == [
        ("ngram, adaptive", "ngram", None),
        ("ngram, 4 tokens", "ngram", 4),
        ("ngram+suffix, adaptive", "ngram,suffix", None),
        ("ngram+suffix, 4 tokens", "ngram,suffix", 4),
    ]
    assert [arm.name for arm in grid_of(["auto"], [None], base)] == ["auto"]
    assert grid_of(["auto"], [4], base)[0].speculation.num_speculative_tokens == 4, "as it was asked for"
    for names, nodes in ((["none"], [None]), (["ngram"], [0]), ([], [None])):
        with pytest.raises(RequestError, match="guesses"):
            grid_of(names, nodes, base)


# Texts for readers


class Telling(FakeStage):
    def write(self, arm: Variant, job: MeasureJob) -> TimedOutput:
        written = super().write(arm, job)
        tokens = written.tokens * job.batch
        origins = tuple("ngram" if token in (1, 2) and arm != PLAIN else "target" for token in tokens)
        return replace(written, tokens=tokens, origins=origins, lengths=(len(TEXT),) * job.batch)


@pytest.mark.parametrize("batch", [1, 2])
def test_texts_are_kept_with_who_proposed_what(batch: int) -> None:
    samples: list[object] = []
    plan = Plan(rounds=2, batches=(batch,), temperatures=(0.0,))
    measure(Telling(), [PLAIN, *arms("b", "a")], items(code=2), plan, samples, watch_nothing)  # type: ignore[arg-type]
    found = records(samples, Telling().spell)  # type: ignore[arg-type]
    assert [record.item for record in found] == ["code-0", "code-1"]
    for record in found:
        assert [version.arm for version in record.versions] == ["plain", "b", "a"] and record.prompt == "<1>"
        _, other, _ = record.versions
        assert other.runs[:3] == (
            ("target", "<0>"),
            ("ngram", "<1><2>"),
            ("target", "".join(f"<{i}>" for i in range(3, 11))),
        )
        assert (other.tokens, other.guessed, other.same, record.versions[0].same) == (11, 2, True, None)


# What is kept


def measured() -> Result:
    facts = {"model": "m", "machine": {"cores": 2}}
    return run(BenchJob("offline", arms("a"), items(code=4), BOTH, facts), FakeStage(steps=4), watch_nothing).result


def test_a_stored_run_is_read_back_whole(tmp_path: Path) -> None:
    result = measured()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(result.as_json()))
    assert read_result(path) == replace(result, texts=())
    assert result_from_json(result.as_json()).as_json() == result.as_json()


def test_a_file_that_is_no_run_is_said(tmp_path: Path) -> None:
    for text, words in [
        (None, "there is no"),
        ("{", "is not JSON"),
        ('{"bench": "load"}', "is no run of bench offline"),
    ]:
        path = tmp_path / "run.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(RequestError, match=words):
            read_result(path)


def test_the_last_line_is_short() -> None:
    told = brief(measured().as_json())
    assert told["bench"] == "offline" and told["model"] == "m" and told["complete"] is True and "speedup" not in told
    assert set(told["cells"][0]) >= {
        "task",
        "arm",
        "batch",
        "speedup",
        "speedup_interval",
        "accepted_per_step",
        "same_text",
    }
    assert "token_seconds" not in told["cells"][0] and told["cells"][0]["accepted_per_step"] == 2.75
    one = brief({**measured().as_json(), "overall": [{"speedup": 1.23456789, "speedup_interval": [1.0, 2.0]}]})
    assert one["speedup"] == 1.235 and one["speedup_interval"] == [1.0, 2.0]


# A bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar() -> None:
    stream, now = Terminal(), 0.0
    progress = Progress(stream, lambda: now)
    progress(0, 2, "writing")
    now = 3.0
    progress(1, 2, "writing")
    progress(2, 2, "done")
    lines = stream.getvalue().split("\r\x1b[K")[1:]
    assert lines[1] == f"{'█' * 12}{'░' * 12} [1/2] writing, about 3 s left" and lines[2].endswith("done\n")
    assert [len(bar(done, 7)) for done in range(8)] == [WIDTH] * 8 and bar(7, 7) == "█" * WIDTH


# The engine


def test_texts_written_at_once_are_those_written_alone(tiny_folder: Path) -> None:
    (arm,) = arms_of(["ngram"], [4], SpeculationConfig())
    llm = open_with([arm], model=tiny_folder, quiet=True)
    stage = EngineBackend(llm, DrafterSlots(llm, open_model(str(tiny_folder), EngineConfig(), no_progress)))
    fox = "The quick brown fox. The quick"
    asked = [BenchPrompt(f"fox-{i}", "copy", text=f"{i} {fox}", sampling={"ignore_eos": True}) for i in range(3)]
    plan = Plan(max_tokens=12)
    stage.refresh([PLAIN, arm])
    jobs = [stage.prepare(item, 0.0, plan)[0] for item in asked]
    alone = [stage.write(PLAIN, job) for job in jobs]
    together = stage.write(arm, replace(jobs[0], beside=tuple(jobs[1:])))
    assert together.tokens == tuple(token for written in alone for token in written.tokens)
    assert together.lengths == (12, 12, 12) and together.timed is not None and 30 <= together.timed <= 33
    assert sum(count for _, count in together.pace) == together.timed
    assert sum(seconds for seconds, _ in together.pace) >= together.decoding > 0
    assert len(together.origins) == 36 and sum(together.places.stood) == together.origins.count("ngram")
    assert 0 < together.steps <= 36 and together.promised and together.whole >= together.decoding
    assert "".join(stage.spell(jobs[0].prompt)).endswith(fox)
