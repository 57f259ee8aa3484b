"""A step that runs out of memory is planned anew, smaller; the texts do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from foretell.engine.engine import Engine
from foretell.engine.scheduler import STEPS_TO_RESTORE
from foretell.errors import is_oom
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run

SHORTAGES = [
    torch.OutOfMemoryError("planted"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError("not enough memory for a step of 64 rows"),
    MemoryError(),
]


def short_of_memory(engine: Engine, most: Callable[[], int], error: Exception | None = None) -> None:
    """Let steps of more than so many rows fail."""
    forward = engine.runner.forward

    def tight(shares, drafts):  # type: ignore[no-untyped-def]
        if sum(share.num_new_tokens + len(draft) for share, draft in zip(shares, drafts, strict=True)) > most():
            raise error or torch.OutOfMemoryError("planted")
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
    assert engine.oom_backoff.num_ooms > 0
    assert engine.runner.pool.num_held == 0


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
    for _ in range(STEPS_TO_RESTORE * 8):
        engine.oom_backoff.record_success()
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == whole


@pytest.mark.parametrize("error", SHORTAGES, ids=str)
def test_a_long_prompt_runs_in_smaller_steps(error: Exception) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 7
    (truth,) = generate(prompts=[prompt])
    engine = World().engine()
    short_of_memory(engine, lambda: 8, error)
    (track,) = add(engine, "1", prompt)
    run(engine)
    assert track.seq.tokens[len(prompt) :] == truth
    assert engine.oom_backoff.num_ooms == 3, "56 tokens, then 28, 14 and 7 of them"


def test_a_shortage_of_this_machine_is_recognised() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**52, dtype=torch.uint8)
    assert is_oom(failed.value)


@pytest.mark.parametrize("error", SHORTAGES, ids=str)
def test_without_memory_to_judge_a_step_it_is_run_again(error: Exception) -> None:
    engine = World().engine(model_drafter(seed=5))
    sequence_verifier, failing = engine.verifier.sequence_verifier, iter([False, False, True, False, True])
    verify_cases = sequence_verifier.verify_cases

    def failing_verify(*args):  # type: ignore[no-untyped-def]
        if next(failing, False):
            raise error
        return verify_cases(*args)

    sequence_verifier.verify_cases = failing_verify  # type: ignore[method-assign]
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, temperature=1.0)]
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == generate(temperature=1.0)
    assert engine.oom_backoff.num_ooms == 2


def test_what_a_failed_step_worked_with_is_let_go_before_smaller_ones_are_planned() -> None:
    engine, left = World().engine(), []

    def fails(shares, drafts):  # type: ignore[no-untyped-def]
        worked_with = torch.zeros(9)
        left.append(weakref.ref(worked_with))
        raise torch.OutOfMemoryError("planted")

    engine.runner.forward = fails  # type: ignore[method-assign]
    add(engine, "1", PROMPTS[1])
    engine.scheduler.preempt = lambda seq: None  # type: ignore[method-assign]
    engine.scheduler.release_unused = lambda seq: left.append(left[0]())  # type: ignore[method-assign]
    engine.step()
    assert left[1:] == [None]


def test_another_failure_is_no_lack_of_memory() -> None:
    engine = World().engine()

    def fails(shares, drafts):  # type: ignore[no-untyped-def]
        raise RuntimeError("an illegal memory access was encountered")

    engine.runner.forward = fails  # type: ignore[method-assign]
    add(engine, "1", PROMPTS[1])
    with pytest.raises(RuntimeError, match="illegal"):
        engine.step()


def test_a_single_row_without_memory_is_a_failure() -> None:
    engine = World().engine()
    short_of_memory(engine, lambda: 0)
    add(engine, "1", PROMPTS[2])
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)
