"""Our own engine as a stage: drafters take their seats, prompts are ready, and what was written is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.bench.drafter_slots import DrafterSlots, has_weights, open_with
from foretell.bench.engine_backend import EngineBackend
from foretell.bench.measure import PLAIN, arms_of
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.build.model_source import ModelSource, no_progress, open_model
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.ngram import NGramDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.llm import LLM
from foretell.types import Budget, Draft, Request, Sequence, SpeculationChoice


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder), EngineConfig(), no_progress)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return open_with(arms_of(["ngram", "exit:1"], [4], SpeculationConfig()), model=tiny_folder, quiet=True)


def test_a_seat_is_taken_by_a_drafter_that_has_learnt_nothing(llm: LLM, target: ModelSource) -> None:
    arms = arms_of(["suffix", "ngram"], [4], SpeculationConfig())
    seats = DrafterSlots(llm, target)
    first = seats.make(arms[0].speculation)
    first.take()
    assert llm.engine.drafter is first.drafter is llm.assembly.requests.drafter
    llm.generate("The quick brown fox jumps over the lazy dog")
    assert first.drafter.seconds > 0
    suffix = first.drafter.drafters["suffix"]
    assert isinstance(suffix, SuffixDrafter) and suffix.store.memory > 0
    again = seats.make(arms[0].speculation).drafter.drafters["suffix"]
    assert isinstance(again, SuffixDrafter) and again.store.memory == 0
    other = seats.make(arms[1].speculation)
    other.take()
    assert isinstance(llm.engine.drafter.drafters["ngram"], NGramDrafter)
    assert first.drafter.seconds > other.drafter.seconds == 0


def test_a_model_that_guesses_is_loaded_once(tiny_folder: Path, target: ModelSource) -> None:
    names = [f"model:{tiny_folder}", f"model:{tiny_folder}+suffix", "suffix"]
    alone, both, free = arms_of(names, [4], SpeculationConfig(draft_temperature="entropy"))
    assert [has_weights(name) for name in (names[0], "suffix", "exit:1")] == [True, False, False]
    llm = open_with([alone, both, free], model=tiny_folder, quiet=True)
    seats, loaded = DrafterSlots(llm, target), llm.engine.drafter.drafters
    assert set(loaded) >= {names[0], "suffix"} and llm.speculation.draft_temperature == "entropy"
    for arm in (alone, both, free, alone):
        seat = seats.make(arm.speculation)
        seat.take()
        llm.generate("The quick brown fox jumps over")
        assert seat.drafter.drafters.get(names[0]) is (None if arm is free else loaded[names[0]])
        assert seat.drafter.drafters.get("suffix") is not loaded["suffix"]
        assert seat.drafter.default_drafters == tuple(arm.speculation.drafter.split(","))
    assert llm.engine.stats.drafter_failures == 0


def test_later_turns_follow_plain_answers_and_every_prompt_is_cached(llm: LLM, target: ModelSource) -> None:
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    talk = BenchPrompt("talk", "chat", ({"role": "user", "content": "Hi"},), turns=("And?",))
    first, second = stage.prepare(talk, 0.0, Plan(max_tokens=20))
    (output,) = llm.generate([list(first.prompt)], first.params)
    answer = [{"role": "assistant", "content": output.outputs[0].text}, {"role": "user", "content": "And?"}]
    assert list(second.prompt) == stage.encode([*talk.messages, *answer])
    assert (first.turn, second.turn) == (0, 1)
    stage.refresh([PLAIN])
    cached = llm.engine.stats.cached_prompt_tokens
    stage.write(PLAIN, second)
    assert llm.engine.stats.cached_prompt_tokens - cached >= len(second.prompt) - 1 - llm.config.page_size


def test_only_some_rules_promise_the_tokens(llm: LLM, target: ModelSource) -> None:
    arms = arms_of(["ngram"], [4], SpeculationConfig(rule="rejection"))
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    stage.refresh([PLAIN, *arms])
    item = BenchPrompt("fox", "copy", text="The quick brown fox. The quick brown fox. The")
    for temperature, promised in ((0.0, True), (1.0, False)):
        (job,) = stage.prepare(item, temperature, Plan(max_tokens=8))
        assert stage.write(arms[0], job).promised is promised
        assert stage.write(PLAIN, job).promised is not promised or temperature == 0.0


def test_a_prediction_goes_to_those_who_read_it(llm: LLM, target: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [PLAIN, *arms_of(["ngram", "prediction", "auto"], [4], SpeculationConfig())]
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    stage.refresh(arms)
    (job,) = stage.prepare(
        BenchPrompt("fox", "edit", text="The quick", prediction="brown fox"), 0.0, Plan(max_tokens=4)
    )
    requests, given = llm.assembly.requests, []
    make = requests.make

    def seen(name: str, prompt: list[int], params: Any, speculation: SpeculationChoice) -> list[Request]:
        given.append((speculation.enabled, speculation.prediction))
        return make(name, prompt, params, speculation)

    monkeypatch.setattr(requests, "make", seen)
    for arm in arms:
        stage.write(arm, job)
    assert given == [(False, None), (True, None), (True, "brown fox"), (True, "brown fox")]


def test_a_drafter_that_fails_is_counted(llm: LLM, target: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    def fail(seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        raise ValueError("broken")

    arms = arms_of(["ngram"], [4], SpeculationConfig())
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    stage.refresh(arms)
    (job,) = stage.prepare(
        BenchPrompt("fox", "copy", text="The quick brown fox. The quick brown"), 0.0, Plan(max_tokens=4)
    )
    stage._seats["ngram"].drafter.inner.propose = fail  # type: ignore[method-assign]
    assert stage.write(arms[0], job).failures > 0
    assert "failed in propose" in caplog.text
