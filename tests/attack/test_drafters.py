"""Drafters that return invalid drafts, raise anything, hang or change their input: the output stays the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.control.adaptive import AdaptiveController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.supervisor import Supervisor, isolate
from foretell.engine.async_engine import AsyncEngine
from foretell.engine.engine import Engine
from foretell.types import Budget, Draft, DrafterTraits, Sequence, StepResult
from tests.server.test_async_engine import alone, requests
from tests.tiny import PROMPTS, VOCAB, World, add, generate

Script = Callable[[Sequence, Budget], Any]


def raw(tokens: Any, parents: Any = (-1,), **parts: Any) -> Draft:
    """Return a draft without the checks of its constructor."""
    draft = object.__new__(Draft)
    fields = {
        "source": "faulty",
        "sampled": None,
        "confidence": None,
        "probs": None,
        "origins": None,
        "device_draft": None,
    }
    for name, value in {"tokens": tokens, "parents": parents, **fields, **parts}.items():
        object.__setattr__(draft, name, value)
    return draft


def sampled(probs: Any) -> Script:
    return lambda seq, budget: raw((5,), (-1,), sampled=(True,), probs=probs)


def throws(error: BaseException) -> Script:
    def fail(seq: Sequence, budget: Budget) -> Draft:
        raise error

    return fail


HALF = torch.full((1, VOCAB), 0.5 / VOCAB)
INVALID: dict[str, Script] = {
    "floats": lambda seq, budget: Draft.chain([1.5]),  # type: ignore[list-item]
    "whole floats": lambda seq, budget: Draft.chain([1.0]),  # type: ignore[list-item]
    "bools": lambda seq, budget: Draft.chain([True]),
    "None as a token": lambda seq, budget: Draft.chain([None]),  # type: ignore[list-item]
    "strings": lambda seq, budget: Draft.chain(["1"]),  # type: ignore[list-item]
    "a string": lambda seq, budget: raw("1", (-1,)),
    "NaN": lambda seq, budget: Draft.chain([math.nan]),  # type: ignore[list-item]
    "a huge integer": lambda seq, budget: Draft.chain([10**40]),
    "a negative integer": lambda seq, budget: Draft.chain([-1]),
    "a float parent": lambda seq, budget: raw((1,), (-1.0,)),
    "a parent of its own": lambda seq, budget: raw((1,), (0,)),
    "cyclic parents": lambda seq, budget: raw((1, 2), (1, 0)),
    "a parent out of range": lambda seq, budget: raw((1, 2), (-1, 7)),
    "a parent before the root": lambda seq, budget: raw((1, 2), (-2, -1)),
    "too few parents": lambda seq, budget: raw((1, 2, 3), (-1,)),
    "too few confidences": lambda seq, budget: raw((1, 2), (-1, 0), confidence=(0.5,)),
    "NaN confidence": lambda seq, budget: raw((1,), (-1,), confidence=(math.nan,)),
    "confidence above 1": lambda seq, budget: raw((1,), (-1,), confidence=(7.0,)),
    "sampled from nothing": sampled(None),
    "NaN probabilities": sampled(torch.full((1, VOCAB), math.nan)),
    "negative probabilities": sampled(torch.tensor([[2.0, -1.0] + [0.0] * (VOCAB - 2)])),
    "probabilities that do not sum to 1": sampled(HALF),
    "probabilities of another shape": sampled(torch.ones(1, 3)),
    "probabilities that are no tensor": sampled("0.5"),
    "origins that are no strings": lambda seq, budget: raw((1,), (-1,), origins=([],)),
    "tokens on a device, unasked": lambda seq, budget: raw((1.5,), (-1,), device_draft="x"),
    "not a draft": lambda seq, budget: {"tokens": [1]},
    "no draft at all": lambda seq, budget: None,
    "an error": throws(ValueError("no idea")),
    "an exit": throws(SystemExit(3)),
    "a closed generator": throws(GeneratorExit()),
    "a cancelled task": throws(asyncio.CancelledError()),
    "no memory": throws(MemoryError()),
}
VALID: dict[str, Script] = {
    "numpy integers": lambda seq, budget: Draft.chain([np.int64(1), np.int32(2)]),  # type: ignore[list-item]
    "torch integers": lambda seq, budget: raw(list(torch.tensor([1, 2])), [-1, 0]),
    "lists": lambda seq, budget: raw([1, 2], [-1, 0], confidence=[0.5, np.float32(0.5)], sampled=[False, False]),
    "longer than its budget": lambda seq, budget: Draft.chain([1] * 500),
}


class Scripted(Drafter):
    """A drafter that returns what a function returns, unchecked."""

    name = "faulty"

    def __init__(self, script: Script, free: bool = False) -> None:
        self.script, self.calls = script, 0
        self.traits = DrafterTraits(is_free=free)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self.calls += 1
        return [self.script(*pair) for pair in zip(seqs, budgets, strict=True)]


def engine_with(drafter: Drafter, mixed: bool) -> Engine:
    supervisor = Supervisor(lambda: 0.0)
    drafters = [NGramDrafter(1, 3), drafter] if mixed else [drafter]
    return World().engine(MixDrafter(drafters, supervisor=supervisor))


def outputs(engine: Engine, rule: str) -> list[list[int]]:
    choice, params = SpeculationChoice(rule=rule), {"temperature": 1.0, "max_tokens": 12}
    states = [add(engine, str(i), prompt, choice, **params)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(1000):
        if not engine.busy:
            break
        engine.step()
    assert not engine.busy and engine.runner.pool.num_held == 0
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


@cache
def plain(rule: str) -> list[list[int]]:
    return outputs(World().engine(), rule)


@pytest.mark.parametrize(("rule", "free"), [("match", False), ("match", True), ("rejection", False)])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "in a mix"])
@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_draft_costs_only_itself(fault: str, mixed: bool, rule: str, free: bool) -> None:
    engine = engine_with(Scripted(INVALID[fault], free), mixed)
    found = outputs(engine, rule)
    if rule == "match" or not mixed:  # under rejection the other drafter's draft tokens take part in sampling
        assert found == plain(rule)
    assert engine.safe_drafter.failures > 0 and engine.drafter.unavailable == {"faulty"}
    assert "faulty" not in engine.stats.speculation.by_drafter
    assert not mixed or engine.stats.speculation.by_drafter["ngram"].drafted > 0


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "in a mix"])
@pytest.mark.parametrize("form", VALID)
def test_integers_of_other_libraries_are_converted(form: str, mixed: bool) -> None:
    engine = engine_with(Scripted(VALID[form]), mixed)
    assert outputs(engine, "match") == plain("match")
    assert engine.safe_drafter.failures == 0 and engine.stats.speculation.by_drafter["faulty"].drafted > 0


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "in a mix"])
def test_a_wrong_number_of_drafts_costs_only_them(mixed: bool, count: int) -> None:
    class Miscounts(Scripted):
        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            return [Draft.chain([1])] * (count if count != len(seqs) else 0)

    engine = engine_with(Miscounts(INVALID["an error"]), mixed)
    assert outputs(engine, "match") == plain("match")
    assert engine.safe_drafter.failures > 0


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError()], ids=repr)
@pytest.mark.parametrize("method", ["propose", "observe", "forget"])
def test_no_exception_of_a_drafter_ends_the_engine_thread(method: str, error: BaseException) -> None:
    def fail(*values: object) -> Any:
        raise error

    drafter = Scripted(lambda seq, budget: Draft.chain([1]))
    setattr(drafter, method, fail)
    wanted = alone(8)

    async def scene() -> None:
        engine = AsyncEngine(World().engine(drafter), 8)
        engine.start()
        for name in ("a", "b"):
            tokens: list[int] = []
            made = requests(engine.engine, name, 8)
            async for piece in engine.submit(made).items():
                tokens += piece.delta.tokens
            assert tokens == wanted
        assert engine.failure is None and not engine.has_died and engine.engine.safe_drafter.failures > 0
        await engine.stop()

    asyncio.run(scene())


def test_a_faulty_custom_drafter_costs_no_output(tiny_folder: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    wanted = LLM(tiny_folder, drafter="none", quiet=True).generate("a b c", params)[0].outputs[0].token_ids
    for fault in ("floats", "an exit", "not a draft"):
        llm = LLM(tiny_folder, drafter=Scripted(INVALID[fault]), num_speculative_tokens=3, quiet=True)
        assert llm.generate("a b c", params)[0].outputs[0].token_ids == wanted, fault
        assert llm.engine.safe_drafter.failures > 0


def test_a_real_interrupt_in_the_main_thread_ends_generate(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, drafter=Scripted(throws(KeyboardInterrupt())), num_speculative_tokens=3, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a b c", SamplingParams(max_tokens=6, ignore_eos=True))


class Vandal(Scripted):
    """A drafter that changes all that it is given."""

    def __init__(self) -> None:
        super().__init__(self._draft)

    def _draft(self, seq: Sequence, budget: Budget) -> Draft:
        self._spoil(seq)
        return Draft.chain([1])

    @staticmethod
    def _spoil(seq: Sequence) -> None:
        seq.tokens.append(3)
        seq.tokens[0] = 9
        seq.pages.clear()
        seq.num_computed_tokens = 0

    def observe(self, results: list[StepResult]) -> None:
        for result in results:
            self._spoil(result.scheduled.seq)

    def forget(self, seq: Sequence) -> None:
        self._spoil(seq)


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "in a mix"])
def test_a_drafter_of_another_package_cannot_change_a_sequence(mixed: bool) -> None:
    engine = engine_with(isolate(Vandal()), mixed)
    assert outputs(engine, "match") == plain("match")
    assert engine.safe_drafter.failures == 0 and engine.stats.speculation.by_drafter["faulty"].drafted > 0


def test_a_drafter_that_hangs_is_used_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms and a draft 5 s, by a manual clock."""
    now = [0.0]
    for module in ("engine", "verifier", "async_scheduling"):
        monkeypatch.setattr(f"foretell.engine.{module}.perf_counter", lambda: now[0])
    truth = generate(max_tokens=60, ignore_eos=True)

    def hang(seq: Sequence, budget: Budget) -> Draft:
        now[0] += 5.0 if budget.nodes else 0.0
        return Draft.chain([1] * budget.nodes)

    drafter = Scripted(hang)
    engine = World().engine(drafter)
    traits = {"faulty": DrafterTraits(prior_acceptance=0.9)}
    engine.controller = AdaptiveController(traits, clock=lambda: now[0], loader=engine.drafter)
    forward = engine.runner.forward

    def slow(*values: Any) -> Any:
        now[0] += 0.01
        return forward(*values)

    monkeypatch.setattr(engine.runner, "forward", slow)
    states = [add(engine, str(i), p, max_tokens=60, ignore_eos=True)[0] for i, p in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert 0 < drafter.calls <= engine.stats.forwards / 4, "it was tried, and rarely again"
