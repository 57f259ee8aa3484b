"""Admission, preemption and swap accounting stay right when requests are aborted, copies fail and limits shrink."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretell.engine.engine import Engine
from foretell.engine.fault_isolation import recover
from foretell.kv import swap as swap_module
from foretell.kv.swap import Swap
from foretell.types import Budget, Draft, Sequence
from tests.tiny import PROMPTS, World, add, check_pages, generate, run

PAGE = 4
ROOM = 1 << 30  # bytes of swap space


def prompt(tokens: int) -> list[int]:
    return [5 * i % 31 + 1 for i in range(tokens)]


def running(engine: Engine, name: str, tokens: list[int]) -> Sequence:
    """Add a request and prefill it."""
    (state,) = add(engine, name, tokens, ignore_eos=True)
    engine.step()
    return state.seq


def swapping(world: World) -> tuple[Engine, Swap]:
    engine = world.engine()
    engine.scheduler.swap = swap = Swap(engine.runner.cache, ROOM)
    return engine, swap


def swapped_bytes(swap: Swap) -> int:
    return sum(pages.nbytes for pages in swap._swapped.values())


def test_a_second_swap_out_replaces_the_first_one() -> None:
    engine, swap = swapping(World(page_size=PAGE))
    seq = running(engine, "0", prompt(9))
    for _ in range(3):
        swap.swap_out(seq)
        assert swap.used == swapped_bytes(swap) > 0
    swap.forget(seq)
    assert swap.used == 0


def test_a_host_copy_that_the_prefix_cache_covers_is_freed_on_admission() -> None:
    engine, swap = swapping(World(page_size=PAGE))
    seq = running(engine, "0", prompt(2 * PAGE))
    assert seq.num_computed_tokens == 2 * PAGE, "only full pages, which stay in the prefix cache"
    for _ in range(3):
        engine.scheduler.preempt(seq)
        assert swap.used == swapped_bytes(swap)
        engine.scheduler.schedule([])
        assert seq.num_computed_tokens == 2 * PAGE and swap.used == 0
    assert swap.swapped_in == 0


def test_swap_space_is_all_free_after_many_preemptions() -> None:
    engine, swap = swapping(World(page_size=PAGE, pages=14, max_num_seqs=5))
    states = [state for i, each in enumerate(PROMPTS * 2) for state in add(engine, str(i), each, ignore_eos=True)]

    def preempt_often(engine: Engine) -> None:
        assert swap.used == swapped_bytes(swap)
        if engine.stats.forwards % 2 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    run(engine, preempt_often)
    assert swap.swapped_out > 10 and swap.used == 0
    assert all(state.seq.finish_reason for state in states)


def blocked() -> tuple[Engine, Sequence]:
    """Return an engine with free pages whose first waiting request does not fit, and the small request after it."""
    engine = World(page_size=PAGE, pages=24, prefix_cache=False).engine()
    running(engine, "0", prompt(40))
    add(engine, "1", prompt(60))
    (small,) = add(engine, "2", prompt(3))
    engine.step()
    assert small.seq in engine.scheduler.waiting and not engine.scheduler.may_admit
    return engine, small.seq


def test_an_abort_of_the_first_waiting_request_lets_the_next_one_in() -> None:
    engine, small = blocked()
    engine.abort("1")
    assert engine.scheduler.may_admit
    engine.step()
    assert small in engine.scheduler.running


class FailingSwap(Swap):
    def swap_out(self, seq: Sequence) -> None:
        raise ValueError("planted")


def test_a_preempted_sequence_waits_even_if_its_copy_fails() -> None:
    engine = World(page_size=PAGE).engine()
    engine.scheduler.swap = FailingSwap(engine.runner.cache, ROOM)
    seq = running(engine, "0", prompt(9))
    with pytest.raises(ValueError, match="planted"):
        engine.scheduler.preempt(seq)
    assert list(engine.scheduler.waiting) == [seq] and not engine.scheduler.running
    assert not seq.pages and engine.runner.pool.num_held == 0
    engine.abort("0")
    assert not engine.busy


@pytest.mark.parametrize("failing", ["_to_host", "_to_device"])
@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError(), OSError()])
def test_a_copy_that_fails_costs_a_second_prefill_only(
    failing: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Tensor:
        raise error

    truth = generate(None, World())
    engine, swap = swapping(World(page_size=PAGE, pages=14, max_num_seqs=5))
    monkeypatch.setattr(swap_module, failing, fails)
    states = [state for i, each in enumerate(PROMPTS) for state in add(engine, str(i), each)]
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
    assert engine.scheduler.preemptions > 0 and swap.swapped_in == swap.used == 0


def decoding() -> Engine:
    """Return an engine with five sequences that decode."""
    engine = World(page_size=PAGE, prefix_cache=False).engine()
    for i, each in enumerate(PROMPTS):
        add(engine, str(i), each, ignore_eos=True)
    engine.step()
    assert all(seq.pending == 1 for seq in engine.scheduler.running) and len(engine.scheduler.running) == 5
    return engine


def test_budgets_are_never_negative() -> None:
    engine = decoding()
    engine.scheduler.max_step_tokens = 1
    add(engine, "9", [1, 2, 3])
    scheduled = engine.scheduler.schedule([Budget(4)] * 5)
    assert [(each.num_new_tokens, each.budget.nodes) for each in scheduled] == [(1, 0)] * 5


def test_a_draft_cut_to_less_than_nothing_is_empty() -> None:
    assert len(Draft.chain([1, 2, 3]).truncate(-1)) == 0


def out_of_memory_alone(engine: Engine) -> Callable[[], None]:
    """Let the next step fail, then every step of more than one row run out of memory, until called."""
    forward, memory = engine.runner.forward, {"calls": 0, "off": False}

    def limited(scheduled, drafts):  # type: ignore[no-untyped-def]
        memory["calls"] += 1
        rows = sum(each.num_new_tokens + len(draft) for each, draft in zip(scheduled, drafts, strict=True))
        if not memory["off"] and (memory["calls"] == 1 or rows > 1):
            raise ValueError("planted") if memory["calls"] == 1 else torch.OutOfMemoryError("planted")
        return forward(scheduled, drafts)

    engine.runner.forward = limited  # type: ignore[method-assign]
    return lambda: memory.update(off=True)


def test_isolation_leaves_no_more_running_than_the_limits_allow() -> None:
    engine = decoding()
    add(engine, "9", prompt(8))
    memory_is_back = out_of_memory_alone(engine)
    with pytest.raises(ValueError, match="planted") as failed:
        engine.step()
    found = recover(engine, list(engine.states.values()), failed.value)
    scheduler = engine.scheduler
    assert not found.failed and engine.oom_backoff.num_ooms == 1
    assert len(scheduler.running) <= scheduler.max_num_seqs < 6
    check_pages(engine)
    memory_is_back()
    while engine.busy:
        engine.step()
    assert engine.runner.pool.num_held == 0
