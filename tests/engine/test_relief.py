"""A step that runs out of memory is planned anew, smaller; the texts do not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.engine.engine import Engine
from foretell.engine.relief import PATIENCE
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run


def short_of_memory(engine: Engine, most: Callable[[], int]) -> None:
    """Let steps of more than so many rows fail."""
    forward = engine.runner.forward

    def tight(shares, drafts):  # type: ignore[no-untyped-def]
        if sum(share.take + len(draft) for share, draft in zip(shares, drafts, strict=True)) > most():
            raise torch.OutOfMemoryError("planted")
        return forward(shares, drafts)

    engine.runner.forward = tight  # type: ignore[method-assign]


@pytest.mark.parametrize("most", [1, 3, 20])
def test_texts_go_on_in_smaller_steps(most: int) -> None:
    truth = generate()
    engine = World().engine(model_drafter(seed=5))
    short_of_memory(engine, lambda: most)
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert engine.relief.sheds > 0
    assert engine.runner.pool.held == 0


def test_larger_steps_come_back() -> None:
    engine = World().engine()
    scheduler = engine.scheduler
    whole = (scheduler.max_num_seqs, scheduler.max_step_tokens)
    memory = [2]
    short_of_memory(engine, lambda: memory[0])
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt)
    run(engine)
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) < whole
    memory[0] = 10**6
    for _ in range(PATIENCE * 8):
        engine.relief.went_well()
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == whole


def test_a_single_row_without_memory_is_a_failure() -> None:
    engine = World().engine()
    short_of_memory(engine, lambda: 0)
    add(engine, "1", PROMPTS[2])
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)
