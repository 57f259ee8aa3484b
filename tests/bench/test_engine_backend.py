"""The engine as a benchmark backend: drafter slots, prepared prompts and timed outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.bench import engine_backend
from foretell.bench.drafter_slots import DrafterSlots, has_weights, load_llm_for
from foretell.bench.engine_backend import EngineBackend
from foretell.bench.measure import PLAIN, variants_of
from foretell.bench.prompt import BenchPrompt
from foretell.bench.settings import BenchSettings
from foretell.build.model_source import ModelSource, no_progress, open_model
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.ngram import NGramDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.llm import LLM
from foretell.types import Budget, Draft, Request, Sequence, SpeculationChoice
from tests.heads.test_head_names import write_heads


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder), EngineConfig(), no_progress)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return load_llm_for(variants_of(["ngram", "exit:1"], [4], SpeculationConfig()), model=tiny_folder, quiet=True)


def test_a_drafter_slot_starts_with_a_fresh_drafter(llm: LLM, target: ModelSource) -> None:
    variants = variants_of(["suffix", "ngram"], [4], SpeculationConfig())
    slots = DrafterSlots(llm, target)
    first = slots.make(variants[0].speculation)
    first.activate()
    assert llm.engine.drafter is first.drafter is llm.assembly.requests.drafter
    llm.generate("The quick brown fox jumps over the lazy dog")
    assert first.drafter.seconds > 0
    suffix = first.drafter.drafters["suffix"]
    assert isinstance(suffix, SuffixDrafter) and suffix.store.memory > 0
    again = slots.make(variants[0].speculation).drafter.drafters["suffix"]
    assert isinstance(again, SuffixDrafter) and again.store.memory == 0
    other = slots.make(variants[1].speculation)
    other.activate()
    assert isinstance(llm.engine.drafter.drafters["ngram"], NGramDrafter)
    assert first.drafter.seconds > other.drafter.seconds == 0


def test_a_draft_model_is_loaded_once(tiny_folder: Path, target: ModelSource) -> None:
    names = [f"model:{tiny_folder}", f"model:{tiny_folder}+suffix", "suffix"]
    alone, both, free = variants_of(names, [4], SpeculationConfig(draft_temperature="entropy"))
    assert [has_weights(name) for name in (names[0], "suffix", "exit:1")] == [True, False, False]
    llm = load_llm_for([alone, both, free], model=tiny_folder, quiet=True)
    slots, loaded = DrafterSlots(llm, target), llm.engine.drafter.drafters
    assert set(loaded) >= {names[0], "suffix"} and llm.speculation.draft_temperature == "entropy"
    for variant in (alone, both, free, alone):
        slot = slots.make(variant.speculation)
        slot.activate()
        llm.generate("The quick brown fox jumps over")
        assert slot.drafter.drafters.get(names[0]) is (None if variant is free else loaded[names[0]])
        assert slot.drafter.drafters.get("suffix") is not loaded["suffix"]
        assert slot.drafter.default_drafters == tuple(variant.speculation.drafter.split(","))
    assert llm.engine.stats.drafter_failures == 0


def test_later_turns_follow_plain_answers_and_every_prompt_is_cached(llm: LLM, target: ModelSource) -> None:
    backend = EngineBackend(llm, DrafterSlots(llm, target))
    talk = BenchPrompt("talk", "chat", ({"role": "user", "content": "Hi"},), turns=("And?",))
    first, second = backend.prepare(talk, 0.0, BenchSettings(max_tokens=20))
    (output,) = llm.generate([list(first.prompt)], first.params)
    answer = [{"role": "assistant", "content": output.outputs[0].text}, {"role": "user", "content": "And?"}]
    assert list(second.prompt) == backend.encode([*talk.messages, *answer])
    assert (first.turn, second.turn) == (0, 1)
    backend.reset([PLAIN])
    cached = llm.engine.stats.cached_prompt_tokens
    backend.generate(PLAIN, second)
    assert llm.engine.stats.cached_prompt_tokens - cached >= len(second.prompt) - 1 - llm.config.page_size


def test_every_variant_has_every_prompt_cached(tmp_path: Path, tiny_folder: Path, target: ModelSource) -> None:
    """An engine that gets a drafter with a head drops all pages, because they lack the head's KV."""
    write_heads(tiny_folder, tmp_path)
    variants = [PLAIN, *variants_of([f"eagle:{tmp_path / 'eagle'}", "ngram"], [4], SpeculationConfig())]
    llm = load_llm_for(variants[1:], model=tiny_folder, quiet=True)
    backend = EngineBackend(llm, DrafterSlots(llm, target))
    backend.reset(variants)
    text = "The quick brown fox jumps over the lazy dog. " * 2
    talk = BenchPrompt("talk", "chat", ({"role": "user", "content": text},), turns=("And?",))
    jobs = backend.prepare(talk, 0.0, BenchSettings(max_tokens=8))
    assert len(jobs) == 2 and len(jobs[0].prompt) > 2 * llm.config.page_size
    prefilled: list[int] = []
    measure = engine_backend.timed_generate

    def counted(llm: LLM, requests: list[Request]) -> engine_backend.GenerateTimes:
        cached = llm.engine.stats.cached_prompt_tokens
        times = measure(llm, requests)
        prefilled.append(len(requests[0].prompt) - (llm.engine.stats.cached_prompt_tokens - cached))
        return times

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_backend, "timed_generate", counted)
        for job in jobs:
            for variant in variants:
                backend.generate(variant, job)
    assert len(prefilled) == 6 and max(prefilled) <= llm.config.page_size


def test_only_some_rules_promise_the_tokens(llm: LLM, target: ModelSource) -> None:
    variants = variants_of(["ngram"], [4], SpeculationConfig(rule="rejection"))
    backend = EngineBackend(llm, DrafterSlots(llm, target))
    backend.reset([PLAIN, *variants])
    item = BenchPrompt("fox", "copy", text="The quick brown fox. The quick brown fox. The")
    for temperature, must_match in ((0.0, True), (1.0, False)):
        (job,) = backend.prepare(item, temperature, BenchSettings(max_tokens=8))
        assert backend.generate(variants[0], job).must_match is must_match
        assert backend.generate(PLAIN, job).must_match is not must_match or temperature == 0.0


def test_a_prediction_goes_to_drafters_that_use_it(
    llm: LLM, target: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [PLAIN, *variants_of(["ngram", "prediction", "auto"], [4], SpeculationConfig())]
    backend = EngineBackend(llm, DrafterSlots(llm, target))
    backend.reset(variants)
    (job,) = backend.prepare(
        BenchPrompt("fox", "edit", text="The quick", prediction="brown fox"), 0.0, BenchSettings(max_tokens=4)
    )
    requests, given = llm.assembly.requests, []
    make = requests.make

    def seen(name: str, prompt: list[int], params: Any, speculation: SpeculationChoice) -> list[Request]:
        given.append((speculation.enabled, speculation.prediction))
        return make(name, prompt, params, speculation)

    monkeypatch.setattr(requests, "make", seen)
    for variant in variants:
        backend.generate(variant, job)
    assert given[::2] == [(False, None)] * 4, "the prompt is prefilled first"
    assert given[1::2] == [(False, None), (True, None), (True, "brown fox"), (True, "brown fox")]


def test_a_drafter_that_fails_is_counted(llm: LLM, target: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    def fail(seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        raise ValueError("broken")

    variants = variants_of(["ngram"], [4], SpeculationConfig())
    backend = EngineBackend(llm, DrafterSlots(llm, target))
    backend.reset(variants)
    (job,) = backend.prepare(
        BenchPrompt("fox", "copy", text="The quick brown fox. The quick brown"), 0.0, BenchSettings(max_tokens=4)
    )
    backend._slots["ngram"].drafter.drafters["ngram"].propose = fail  # type: ignore[method-assign]
    assert backend.generate(variants[0], job).drafter_failures > 0
    assert "failed in propose" in caplog.text
