"""Idle unload of drafters, and drafters that do not fit into memory."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import foretell.build.engine_builder
from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.config import SpeculationConfig
from foretell.control.adaptive import AdaptiveController
from foretell.control.settings import ControllerSettings
from foretell.draft.base import Drafter
from foretell.draft.idle_unload import RETRY, Background, UnloadableDrafter
from foretell.draft.load import drop_unaffordable
from foretell.draft.mix import MixDrafter
from foretell.draft.model import ModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.errors import CapacityError, RequestError
from foretell.runner.memory_plan import MemoryPlan
from foretell.types import Budget, Draft
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class AtOnce(Background):
    """Runs work at once and keeps timers for the test."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def start(self, work: Callable[[], None]) -> None:
        work()

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        self.waiting.append((seconds, work))


class Guest:
    """An unloadable drafter with a manual clock."""

    def __init__(self, make: Callable[[], Drafter] = lambda: model_drafter(seed=0)) -> None:
        self.now, self.background, self.made = 0.0, AtOnce(), 0
        self.make = make
        self.drafter = UnloadableDrafter(make(), self._again, 10.0, self.background, lambda: self.now)

    def _again(self) -> Drafter:
        self.made += 1
        return self.make()

    def look(self) -> None:
        """Let the timer expire."""
        _, work = self.background.waiting.pop()
        work()


def test_an_idle_drafter_is_unloaded_and_loaded_again_on_request() -> None:
    guest = Guest()
    (state,) = add(World().engine(guest.drafter), "0", PROMPTS[0])
    draft = guest.drafter.propose([state.seq], [Budget(3)])[0]
    assert len(draft) == 3
    guest.now = 6.0
    guest.drafter.propose([state.seq], [Budget(3)])
    guest.now = 12.0
    guest.look()
    assert guest.drafter.is_loaded, "it was used six seconds ago"
    assert guest.background.waiting[0][0] == pytest.approx(4.0)
    guest.drafter.propose([state.seq], [Budget(2, is_exploration=True)])
    guest.drafter.propose([state.seq], [Budget(0)])
    guest.now = 16.0
    guest.look()
    assert not guest.drafter.is_loaded, "exploration does not count as use"
    mix = MixDrafter([guest.drafter])
    assert mix.unavailable == {"model"}
    assert guest.drafter.propose([state.seq], [Budget(3)]) == [Draft()]
    guest.drafter.forget(state.seq)
    mix.request_load("model")
    assert guest.drafter.is_loaded
    assert guest.drafter.propose([state.seq], [Budget(3)])[0].tokens == draft.tokens
    guest.drafter.load()
    assert guest.made == 1


def test_a_failed_load_is_retried_with_back_off(caplog: pytest.LogCaptureFixture) -> None:
    guest = Guest()
    guest.now = 11.0
    guest.look()

    def full() -> Drafter:
        raise CapacityError("it needs 2.00 GiB and 1.00 GiB is free")

    guest.make = full
    guest.drafter.load()
    guest.drafter.load()
    assert guest.made == 1
    assert "cannot be loaded: it needs 2.00 GiB" in caplog.text
    guest.now += RETRY
    guest.drafter.load()
    assert guest.made == 2
    guest.now += RETRY
    guest.drafter.load()
    assert guest.made == 2, "the second pause is longer"

    def leave() -> Drafter:
        raise SystemExit(1)

    guest.make = leave
    guest.now += RETRY
    guest.drafter.load()
    assert guest.made == 3
    guest.make = lambda: model_drafter(seed=0)
    guest.now += 4 * RETRY
    guest.drafter.load()
    assert guest.made == 4 and guest.drafter.is_loaded, "an exit does not leave it loading"


@pytest.mark.parametrize(
    "settings", [ControllerSettings(), ControllerSettings(fixed_length=lambda batch: 3)], ids=["adaptive", "fixed"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_the_same_while_it_is_unloaded_and_loaded(
    settings: ControllerSettings, temperature: float
) -> None:
    truth, guest = generate(temperature=temperature), Guest()
    drafter = MixDrafter([NGramDrafter(1, 3), guest.drafter])
    engine = World().engine(drafter)
    traits = {
        name: replace(drafter.traits, relative_cost=1e-4, prior_acceptance=0.95)
        for name, drafter in drafter.drafters.items()
    }
    controller = engine.controller = AdaptiveController(traits, settings, clock=lambda: 0.0, loader=drafter)
    controller.costs.observe(1, 0, 1.0)  # steps are expensive, so drafts pay from the first
    states = [
        state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=temperature)
    ]
    while engine.busy:
        engine.step()
        if engine.stats.forwards % 3 == 0 and guest.drafter.is_loaded:
            guest.now += 11.0
            guest.look()
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert guest.made, "it was loaded again"
    assert engine.stats.speculation.by_drafter["model"].accepted > 0
    assert engine.stats.drafter_failures == 0


def test_a_fixed_length_loads_a_drafter_that_some_sequence_of_the_batch_uses() -> None:
    guest = Guest()
    guest.now = 11.0
    guest.look()
    drafter = MixDrafter([NGramDrafter(1, 3), guest.drafter])
    engine = World().engine(drafter)
    traits = {name: each.traits for name, each in drafter.drafters.items()}
    settings = ControllerSettings(fixed_length=lambda batch: 3)
    engine.controller = AdaptiveController(traits, settings, clock=lambda: 0.0, loader=drafter)
    add(engine, "0", PROMPTS[0])
    add(engine, "1", PROMPTS[1], SpeculationChoice(drafter="ngram"))
    run(engine)
    assert guest.made == 1


@pytest.mark.parametrize("name", ["model", "self:int8"])
def test_weights_are_freed_and_loaded_again(tiny_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"model:{tiny_folder}" if name == "model" else name
    llm = LLM(tiny_folder, drafter=name, draft_idle_unload=1000.0, num_speculative_tokens=3, quiet=True)
    resident = llm.engine.drafter.drafters[name]
    assert isinstance(resident, UnloadableDrafter)
    plain = llm.generate("a b c", PARAMS, speculation=SpeculationChoice(enabled=False))[0].outputs[0].token_ids
    first = llm.generate("a b c", PARAMS)[0]
    assert first.outputs[0].token_ids == plain
    inner = resident._inner
    assert isinstance(inner, ModelDrafter)
    weights = weakref.ref(inner.runner.model)
    del inner
    resident._last_used -= 2000.0
    resident.unload_if_idle()
    gc.collect()
    assert weights() is None, "there is no other reference"
    monkeypatch.setattr(resident, "_background", AtOnce())
    back = llm.generate("a b c", PARAMS)[0]
    assert resident.is_loaded
    assert back.outputs[0].token_ids == plain
    assert back.speculation.drafted > 0
    again = llm.generate("a b c", PARAMS)[0]
    assert again.speculation.accepted_per_step == first.speculation.accepted_per_step, "it drafts as before"


def plan(limit: int) -> Callable[[SpeculationConfig], MemoryPlan]:
    """Return a planner with a byte for the target and each drafter, of which `limit` fit."""

    def planned(config: SpeculationConfig) -> MemoryPlan:
        need = 1 + config.drafter.count(":")
        if need > limit:
            raise CapacityError(f"{need} bytes are needed and {limit} are free")
        return MemoryPlan(need, 0, 1, 1)

    return planned


def test_drafters_that_do_not_fit_are_dropped_the_last_named_first(caplog: pytest.LogCaptureFixture) -> None:
    config = SpeculationConfig(drafter="ngram,model:a,model:b")
    names, heavy = ("ngram", "model:a", "model:b"), ("model:a", "model:b")
    assert drop_unaffordable(config, names, heavy, plan(3)) is config
    assert not caplog.records
    assert drop_unaffordable(config, names, heavy, plan(2)).drafter == "ngram,model:a"
    assert drop_unaffordable(config, names, heavy, plan(1)).drafter == "ngram"
    assert drop_unaffordable(config, ("model:a",), ("model:a",), plan(1)).drafter == "none"
    with pytest.raises(CapacityError, match="1 bytes are needed"):
        drop_unaffordable(config, names, heavy, plan(0))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 4
    assert "model:b is not loaded" in caplog.messages[0]
    assert "3 bytes are needed and 2 are free; drafting continues with ngram, model:a" in caplog.messages[0]
    assert caplog.messages[-1].endswith("speculative decoding is off")


def test_without_memory_for_the_draft_model_decoding_is_plain(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = LLM(tiny_folder, drafter=f"model:{tiny_folder}", quiet=True)
    memory, tokens = whole.assembly.memory, whole.generate("a b c", PARAMS)[0].outputs[0].token_ids
    free = memory.weights + memory.drafter // 2
    monkeypatch.setattr(foretell.build.engine_builder, "device_memory", lambda device: free)
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", max_model_len=64, quiet=True)
    assert not llm.engine.drafter.drafters
    assert "is not loaded" in caplog.text
    assert llm.generate("a b c", PARAMS)[0].outputs[0].token_ids == tokens
    free = memory.weights // 2
    with pytest.raises(CapacityError):
        LLM(tiny_folder, drafter=f"model:{tiny_folder}", max_model_len=64, quiet=True)


def test_the_idle_time_must_be_positive_and_finite() -> None:
    for value in (0.0, -1.0, float("inf")):
        with pytest.raises(RequestError, match="draft_idle_unload"):
            SpeculationConfig(draft_idle_unload=value)


def test_an_engine_ends_without_held_pages() -> None:
    guest = Guest()
    engine = World().engine(guest.drafter)
    add(engine, "0", PROMPTS[0])
    run(engine)
    inner = guest.drafter._inner
    assert isinstance(inner, ModelDrafter)
    assert inner.runner.pool.num_held == 0
