"""Async scheduling on a CUDA device: it is lossless, and the host waits for the previous step only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.engine.engine import Engine
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.executor import AsyncStep
from tests.fake_async import RandomController
from tests.gpu.test_losslessness import DRAFTERS, SAMPLING
from tests.laws.test_async_scheduling import generated
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WORLDS = {"roomy": World(device="cuda"), "few pages": World(device="cuda", page_size=4, pages=12, max_num_seqs=5)}
ALL: dict[str, Callable[[list[list[int]]], Drafter | None]] = {
    "none": lambda truth: None,
    "eagle": lambda truth: OwnHead(HEADS["eagle"]),
    "block": lambda truth: OwnHead(HEADS["block"]),
    **DRAFTERS,
}


def counted(engine: Engine) -> list[int]:
    """Return a list that collects the rows of each async step from now on."""
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
def test_async_scheduling_does_not_change_the_output(
    make: Callable[[list[list[int]]], Drafter | None], sampling: str, world: World
) -> None:
    truth = generate(None, World(), **SAMPLING[sampling])
    drafter = make(truth)
    engine = world.engine(drafter)
    if drafter is not None:
        engine.controller = RandomController(world.budget)
    sent = counted(engine)
    assert generated(engine, **SAMPLING[sampling]) == truth
    assert bool(sent) == (sampling != "penalties")


def test_tokens_are_sampled_from_the_last_logits_after_the_buffer_has_grown() -> None:
    """A graph writes its logits to the buffer it was captured with; a larger step has another buffer."""
    engine = World(device="cuda").engine()
    truth = generate(None, World(), temperature=1.0)
    with capture_now():
        for texts in ((0,), (0, 1, 2, 3, 4), (0,), (1,)):
            tracks = [add(engine, str(i), PROMPTS[i], temperature=1.0)[0] for i in texts]
            sent = counted(engine)
            run(engine)
            assert sent
            assert [t.seq.tokens[len(t.seq.request.prompt) :] for t in tracks] == [truth[i] for i in texts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_waits_for_the_previous_step_only(temperature: float) -> None:
    """The tokens of a step arrive while the next one is still running."""
    engine = World(device="cuda").engine()
    add(engine, "0", PROMPTS[0], max_tokens=60, ignore_eos=True, temperature=temperature)
    sent = counted(engine)
    for _ in range(20):
        engine.step()
    stream = torch.cuda.current_stream()
    before, wait = len(sent), engine.runner.executor._wait_previous  # type: ignore[attr-defined]
    busy: list[bool] = []

    def wait_previous(*args: object) -> object:
        found = wait(*args)
        busy.append(not stream.query())
        return found

    engine.runner.executor._wait_previous = wait_previous  # type: ignore[attr-defined]
    for _ in range(20):
        engine.step()
    assert len(sent) - before == len(busy) == 20
    assert any(busy), "a step of this model takes a tenth of a millisecond, so not every time"
    run(engine)
