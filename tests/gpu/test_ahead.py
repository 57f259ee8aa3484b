"""Steps that begin before their tokens are known, on a CUDA device: the law of the house, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.engine.engine import Engine
from foretell.runner.cuda.graphs import freely
from foretell.runner.executor import AsyncStep
from tests.gpu.test_same_text import DRAFTERS, SAMPLING
from tests.laws.test_ahead import written
from tests.outruns import Sometimes
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WORLDS = {"roomy": World(device="cuda"), "few pages": World(device="cuda", page_size=4, pages=12, max_num_seqs=5)}
ALL: dict[str, Callable[[list[list[int]]], Drafter | None]] = {
    "nobody": lambda truth: None,
    "eagle": lambda truth: OwnHead(HEADS["eagle"]),
    "block": lambda truth: OwnHead(HEADS["block"]),
    **DRAFTERS,
}


def counted(engine: Engine) -> list[int]:
    """The rows of each step that is sent ahead from now on."""
    executor, found = engine.runner.executor, []
    before = executor.forward_async  # type: ignore[attr-defined]

    def ahead(packed: object, *rest: object) -> AsyncStep | None:
        found.append(packed.rows)  # type: ignore[attr-defined]
        sent: AsyncStep | None = before(packed, *rest)
        return sent

    executor.forward_async = ahead  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_text_is_the_same(make: Callable[[list[list[int]]], Drafter | None], sampling: str, world: World) -> None:
    truth = generate(None, World(), **SAMPLING[sampling])
    drafter = make(truth)
    engine = world.engine(drafter)
    if drafter is not None:
        engine.controller = Sometimes(world.budget)
    sent = counted(engine)
    assert written(engine, **SAMPLING[sampling]) == truth
    assert bool(sent) == (sampling != "penalties")


def test_tokens_are_sampled_from_the_logits_of_their_own_step() -> None:
    """A recording leaves its logits where it was made to, and a larger step has them in other room."""
    engine = World(device="cuda").engine()
    truth = generate(None, World(), temperature=1.0)
    with freely():
        for texts in ((0,), (0, 1, 2, 3, 4), (0,), (1,)):
            tracks = [add(engine, str(i), PROMPTS[i], temperature=1.0)[0] for i in texts]
            sent = counted(engine)
            run(engine)
            assert sent
            assert [t.seq.tokens[len(t.seq.request.prompt) :] for t in tracks] == [truth[i] for i in texts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_waits_for_the_step_before_and_not_for_the_one_it_sent(temperature: float) -> None:
    """The tokens of a step are there while the next one still runs."""
    engine = World(device="cuda").engine()
    add(engine, "0", PROMPTS[0], max_tokens=60, ignore_eos=True, temperature=temperature)
    sent = counted(engine)
    for _ in range(20):
        engine.step()
    stream = torch.cuda.current_stream()
    before, land = len(sent), engine.runner.executor._land  # type: ignore[attr-defined]
    busy: list[bool] = []

    def landed(*args: object) -> object:
        found = land(*args)
        busy.append(not stream.query())
        return found

    engine.runner.executor._land = landed  # type: ignore[attr-defined]
    for _ in range(20):
        engine.step()
    assert len(sent) - before == len(busy) == 20
    assert any(busy), "a step of this model takes a tenth of a millisecond, so not every time"
    run(engine)
