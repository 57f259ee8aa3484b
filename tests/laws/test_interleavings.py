"""On a device that works beside the host: whatever comes, goes, makes way or is asked for between any two steps, every
caller is told its own text, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.engine.sequence_state import SequenceState
from tests.outruns import LeavesUnseen, Outruns, Sometimes
from tests.tiny import VOCAB, World, add, check_pages, model_drafter, random_tree, run

Key = tuple[str, int]  # a request and one of its choices

WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 1.0},
    {"presence_penalty": 0.5},
    {"n": 2, "temperature": 0.8},
    {"temperature": 1.0, "logprobs": 1},
)
PLAIN_WISHES: tuple[dict[str, Any], ...] = ({}, {"prompt_logprobs": 1})  # all of whose tokens are the likeliest
WORLDS = (
    World(),
    World(page_size=4, pages=24, max_num_seqs=4),
    World(max_step_tokens=8, prefix_cache=False),
    World(prefix_cache=False),
)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": TokenRecyclingDrafter,
    "unseen": lambda: LeavesUnseen(NGramDrafter()),
    "model": lambda: model_drafter(seed=5),
    "tree": lambda: ScriptedDrafter(random_tree),
}


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: list[int]
    tokens: int
    wishes: dict[str, Any]

    def of(self, engine: Engine) -> list[SequenceState]:
        return add(engine, self.name, self.prompt, max_tokens=self.tokens, **self.wishes)


@cache
def asked(seed: int) -> tuple[list[Asked], dict[Key, list[int]]]:
    """Texts that come one after the other, and what each is without drafts and by itself."""
    rng, found, truth = random.Random(seed), [], {}
    wishes = PLAIN_WISHES if seed % 2 else WISHES
    for i in range(12):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 14))]
        found.append(Asked(str(i), prompt, rng.randrange(2, 20), rng.choice(wishes)))
        tracks = found[-1].of(engine := World().engine())
        run(engine)
        truth |= {(str(i), track.seq.request.choice): track.seq.tokens[len(prompt) :] for track in tracks}
    return found, truth


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(12))
def test_everybody_hears_the_own_text(seed: int, drafter: str) -> None:
    coming, truth = list(asked(seed)[0]), asked(seed)[1]
    rng = random.Random(f"{seed} {drafter}")
    engine = rng.choice(WORLDS).engine(DRAFTERS[drafter]())
    engine.runner.executor = Outruns(engine.runner.executor)
    engine.controller = rng.choice([FixedController(3), Sometimes(3, 0, seed)])
    tracks: dict[Key, SequenceState] = {}
    told: dict[Key, list[int]] = {}
    gone: set[str] = set()
    while coming or engine.busy:
        while coming and rng.random() < 0.6:
            tracks |= {(track.seq.request.id, track.seq.request.choice): track for track in coming.pop().of(engine)}
        if engine.states and rng.random() < 0.25:  # the latest, whose prompt may just be read
            name = rng.choice(list(engine.states.values())[-3:]).seq.request.id
            gone.add(name)
            engine.abort(name)
        if engine.scheduler.running and rng.random() < 0.05:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        for delta in engine.step():
            told.setdefault((delta.request_id, delta.choice), []).extend(delta.tokens)
        check_pages(engine)
    assert engine.runner.pool.num_held == 0 and not engine.safe_drafter.failures
    for key, track in tracks.items():
        heard, text = told.get(key, []), truth[key]
        assert heard == text[: len(heard)] and (key[0] in gone or heard == text)
        if track.seq.request.params.logprobs is not None:
            assert len(track.logprobs) == len(heard)
