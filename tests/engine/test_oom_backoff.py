"""A step that runs out of memory is scheduled again, smaller; the output does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from foretell.engine.engine import Engine
from foretell.engine.scheduler import STEPS_TO_RESTORE
from foretell.errors import is_oom
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run

OOM_ERRORS = [
    torch.OutOfMemoryError("planted"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError("not enough memory for a step of 64 rows"),
    MemoryError(),
]


def limit_memory(engine: Engine, max_rows: Callable[[], int], error: Exception | None = None) -> None:
    """Let steps of more than `max_rows()` rows fail."""
    forward = engine.runner.forward

    def limited(scheduled, drafts):  # type: ignore[no-untyped-def]
        if sum(each.num_new_tokens + len(draft) for each, draft in zip(scheduled, drafts, strict=True)) > max_rows():
            raise error or torch.OutOfMemoryError("planted")
        return forward(scheduled, drafts)

    engine.runner.forward = limited  # type: ignore[method-assign]


@pytest.mark.parametrize("max_rows", [1, 3, 20])
def test_sequences_continue_in_smaller_steps(max_rows: int) -> None:
    truth = generate()
    engine = World().engine(model_drafter(seed=5))
    limit_memory(engine, lambda: max_rows)
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt)]
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert engine.oom_backoff.num_ooms > 0
    assert engine.runner.pool.num_held == 0


def test_the_limits_are_restored() -> None:
    engine = World().engine()
    scheduler = engine.scheduler
    limits = (scheduler.max_num_seqs, scheduler.max_step_tokens)
    memory = [2]
    limit_memory(engine, lambda: memory[0])
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt)
    run(engine)
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) < limits
    memory[0] = 10**6
    for _ in range(STEPS_TO_RESTORE * 8):
        engine.oom_backoff.record_success()
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == limits


@pytest.mark.parametrize("error", OOM_ERRORS, ids=str)
def test_a_long_prompt_runs_in_smaller_steps(error: Exception) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 7
    (truth,) = generate(prompts=[prompt])
    engine = World().engine()
    limit_memory(engine, lambda: 8, error)
    (state,) = add(engine, "1", prompt)
    run(engine)
    assert state.seq.tokens[len(prompt) :] == truth
    assert engine.oom_backoff.num_ooms == 3, "56 tokens, then 28, 14 and 7 of them"


def test_an_out_of_memory_error_of_this_machine_is_recognized() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**52, dtype=torch.uint8)
    assert is_oom(failed.value)


@pytest.mark.parametrize("error", OOM_ERRORS, ids=str)
def test_a_step_is_run_again_if_verification_runs_out_of_memory(error: Exception) -> None:
    engine = World().engine(model_drafter(seed=5))
    rule_verifier, failing = engine.verifier.rule_verifier, iter([False, False, True, False, True])
    verify_cases = rule_verifier.verify_cases

    def failing_verify(*args):  # type: ignore[no-untyped-def]
        if next(failing, False):
            raise error
        return verify_cases(*args)

    rule_verifier.verify_cases = failing_verify  # type: ignore[method-assign]
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=1.0)]
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == generate(temperature=1.0)
    assert engine.oom_backoff.num_ooms == 2


def test_the_tensors_of_a_failed_step_are_freed_before_smaller_ones_are_scheduled() -> None:
    engine, left = World().engine(), []

    def fails(scheduled, drafts):  # type: ignore[no-untyped-def]
        workspace = torch.zeros(9)
        left.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("planted")

    engine.runner.forward = fails  # type: ignore[method-assign]
    add(engine, "1", PROMPTS[1])
    engine.scheduler.preempt = lambda seq: None  # type: ignore[method-assign]
    engine.scheduler.release_unused = lambda seq: left.append(left[0]())  # type: ignore[method-assign]
    engine.step()
    assert left[1:] == [None]


def test_other_errors_are_not_out_of_memory() -> None:
    engine = World().engine()

    def fails(scheduled, drafts):  # type: ignore[no-untyped-def]
        raise RuntimeError("an illegal memory access was encountered")

    engine.runner.forward = fails  # type: ignore[method-assign]
    add(engine, "1", PROMPTS[1])
    with pytest.raises(RuntimeError, match="illegal"):
        engine.step()


def test_running_out_of_memory_with_one_row_is_an_error() -> None:
    engine = World().engine()
    limit_memory(engine, lambda: 0)
    add(engine, "1", PROMPTS[2])
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)
