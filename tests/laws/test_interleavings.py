"""With async scheduling, arrivals, aborts and preemptions between any two steps change no token of any output."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.corpus.drafter import CorpusDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.engine.sequence_state import SequenceState
from tests.draft.corpora import FixedCorpus, random_documents
from tests.fake_async import DeviceDraftDrafter, FakeAsyncExecutor, RandomController
from tests.tiny import VOCAB, World, add, check_pages, model_drafter, random_tree, run

Key = tuple[str, int]  # a request and one of its choices

PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 1.0},
    {"presence_penalty": 0.5},
    {"n": 2, "temperature": 0.8},
    {"temperature": 1.0, "logprobs": 1},
)
GREEDY_PARAMS: tuple[dict[str, Any], ...] = ({}, {"prompt_logprobs": 1})  # greedy
WORLDS = (
    World(),
    World(page_size=4, pages=24, max_num_seqs=4),
    World(max_step_tokens=8, prefix_cache=False),
    World(prefix_cache=False),
)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "corpus": lambda: CorpusDrafter(FixedCorpus(random_documents(seed=0))),
    "recycle": TokenRecyclingDrafter,
    "device": lambda: DeviceDraftDrafter(NGramDrafter()),
    "model": lambda: model_drafter(seed=5),
    "tree": lambda: ScriptedDrafter(random_tree),
}


@dataclass(frozen=True)
class Arrival:
    name: str
    prompt: list[int]
    tokens: int
    params: dict[str, Any]

    def add_to(self, engine: Engine) -> list[SequenceState]:
        return add(engine, self.name, self.prompt, max_tokens=self.tokens, **self.params)


@cache
def arrivals(seed: int) -> tuple[list[Arrival], dict[Key, list[int]]]:
    """Return requests that arrive one after the other, and the output of each alone and without drafts."""
    rng, found, truth = random.Random(seed), [], {}
    params = GREEDY_PARAMS if seed % 2 else PARAMS
    for i in range(12):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 14))]
        found.append(Arrival(str(i), prompt, rng.randrange(2, 20), rng.choice(params)))
        states = found[-1].add_to(engine := World().engine())
        run(engine)
        truth |= {(str(i), state.seq.request.choice): state.seq.tokens[len(prompt) :] for state in states}
    return found, truth


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_its_own_output(seed: int, drafter: str) -> None:
    coming, truth = list(arrivals(seed)[0]), arrivals(seed)[1]
    rng = random.Random(f"{seed} {drafter}")
    engine = rng.choice(WORLDS).engine(DRAFTERS[drafter]())
    engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    engine.controller = rng.choice([FixedController(3), RandomController(3, 0, seed)])
    states: dict[Key, SequenceState] = {}
    emitted: dict[Key, list[int]] = {}
    aborted: set[str] = set()
    while coming or engine.busy:
        while coming and rng.random() < 0.6:
            states |= {(state.seq.request.id, state.seq.request.choice): state for state in coming.pop().add_to(engine)}
        if engine.states and rng.random() < 0.25:  # one of the latest, which may be in prefill
            name = rng.choice(list(engine.states.values())[-3:]).seq.request.id
            aborted.add(name)
            engine.abort(name)
        if engine.scheduler.running and rng.random() < 0.05:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        for delta in engine.step():
            emitted.setdefault((delta.request_id, delta.choice), []).extend(delta.tokens)
        check_pages(engine)
    assert engine.runner.pool.num_held == 0 and not engine.safe_drafter.failures
    for key, state in states.items():
        tokens, expected = emitted.get(key, []), truth[key]
        assert tokens == expected[: len(tokens)] and (key[0] in aborted or tokens == expected)
        if state.seq.request.params.logprobs is not None:
            assert len(state.logprobs) == len(tokens)
