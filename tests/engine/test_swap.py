"""Preempted sequences that are swapped out and in generate the same tokens as recomputed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.engine.engine import Engine
from foretell.kv import swap as module
from foretell.kv.cache import slots_of
from foretell.kv.swap import COPY_SAMPLES, MIN_PREFILL_TOKENS, Swap
from foretell.types import Sequence
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, model_drafter, run

TIGHT = World(page_size=4, pages=14, max_num_seqs=5, prefix_cache=False)
PREFILLS = World(page_size=4, pages=100, max_step_tokens=128, prefix_cache=False)
LONG = [[(7 * i + 3 * n) % 31 + 1 for i in range(66 + n)] for n in range(8)]
PARAMS: dict[str, object] = {"ignore_eos": True, "max_tokens": 60}

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "none": lambda device: MixDrafter([]),
    "model": lambda device: model_drafter(seed=5, device=device),
    "eagle": lambda device: OwnHead(HEADS["eagle"]),
    "block": lambda device: OwnHead(HEADS["block"]),
}


def swapping(world: World = TIGHT, drafter: Drafter | None = None, max_bytes: int = 1 << 30) -> tuple[Engine, Swap]:
    engine = world.engine(drafter)
    engine.scheduler.swap = swap = Swap(engine.runner.cache, max_bytes)
    return engine, swap


def generated(engine: Engine, prompts: list[list[int]] = PROMPTS, **params: object) -> list[list[int]]:
    states = [state for i, prompt in enumerate(prompts) for state in add(engine, str(i), prompt, **params)]
    run(engine)
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


def swaps_and_changes_nothing(make: Callable[[str], Drafter], world: World) -> None:
    """Check that the output is the same without preemption, with recompute and with swapping."""
    for temperature in (0.0, 1.0):
        truth = generate(None, World(device=world.device), temperature=temperature)
        assert generate(make(world.device), world, temperature=temperature) == truth
        engine, swap = swapping(world, make(world.device))
        assert generated(engine, temperature=temperature) == truth
        assert engine.scheduler.preemptions > 0
        assert swap.swapped_out >= swap.swapped_in > 0
        assert swap.used == 0, "no host copy is left"


def restores_kv(make: Callable[[str], Drafter], device: str) -> None:
    """Check that the KV of target and heads is restored bit by bit, even if the pages were overwritten meanwhile."""
    world = World(page_size=4, prefix_cache=False, device=device)
    truth = generate(None, World(device=device))
    engine, swap = swapping(world, make(device))
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt)]
    for _ in range(4):
        engine.step()
    seqs = [state.seq for state in states if state.seq.finish_reason is None]
    assert len(seqs) > 2
    before = [(seq.num_computed_tokens, stored_kv(engine, seq, seq.num_computed_tokens)) for seq in seqs]
    for seq in engine.scheduler.running[::-1]:
        engine.scheduler.preempt(seq)
    for tensor in engine.runner.cache.tensors:
        tensor.fill_(7.0)
    engine.scheduler.schedule([])
    assert swap.swapped_in == len(seqs)
    for seq, (cached, tensors) in zip(seqs, before, strict=True):
        assert seq.num_computed_tokens == cached
        assert all(map(torch.equal, stored_kv(engine, seq, cached), tensors))
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth


def stored_kv(engine: Engine, seq: Sequence, tokens: int) -> list[Tensor]:
    """Return the KV of a sequence's first tokens."""
    slots = slots_of(seq.pages, engine.runner.pool.page_size, 0, tokens)
    return [tensor.flatten(0, 1)[slots].clone() for tensor in engine.runner.cache.tensors]


def measures_and_chooses(world: World) -> bool:
    """Check that the output is the same whether swapping is faster, slower or unknown; return whether it is faster."""
    truth = generate(None, replace(world, pages=512), prompts=LONG, **PARAMS)
    for seconds, copies in ((0.0, True), (1e9, False)):
        engine, swap = swapping(world)
        swap._copy_seconds, swap._prefill_seconds = [seconds] * COPY_SAMPLES, 1.0
        assert generated(engine, LONG, **PARAMS) == truth
        assert engine.scheduler.preemptions > COPY_SAMPLES
        assert (swap.swapped_out > 0) == copies
    engine, swap = swapping(world)
    assert generated(engine, LONG, **PARAMS) == truth
    assert swap._prefill_seconds is not None and swap._prefill_seconds > 0, "prefill steps are timed"
    assert len(swap._copy_seconds) == COPY_SAMPLES and min(swap._copy_seconds) > 0, "and so are the first copies"
    assert swap.swapped_out >= COPY_SAMPLES
    return swap.is_faster


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_swapping_changes_no_output(make: Callable[[str], Drafter], prefix: bool) -> None:
    swaps_and_changes_nothing(make, replace(TIGHT, prefix_cache=prefix))


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_swapping_restores_the_kv(make: Callable[[str], Drafter]) -> None:
    restores_kv(make, "cpu")


def test_swapped_in_tokens_are_not_recomputed() -> None:
    engine, swap = swapping()
    generated(engine)
    plain = TIGHT.engine()
    generated(plain)
    assert swap.swapped_in > 0
    assert engine.stats.rows < plain.stats.rows


def test_without_swap_space_sequences_are_recomputed() -> None:
    engine, swap = swapping(max_bytes=1)
    assert generated(engine) == generate(None, World())
    assert swap.swapped_out == 0


def test_without_memory_for_a_copy_sequences_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    truth = generate(None, World())
    engine, swap = swapping()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_to_host", fails)
        assert generated(engine) == truth
        assert swap.swapped_out == swap.used == 0 and engine.scheduler.preemptions > 0
    engine, swap = swapping()
    monkeypatch.setattr(module, "_to_device", fails)
    assert generated(engine) == truth
    assert swap.swapped_out > 0 and swap.swapped_in == swap.used == 0


def test_swapping_or_recomputing_is_chosen_by_measurement() -> None:
    measures_and_chooses(PREFILLS)


def test_sequences_are_swapped_only_if_that_is_faster() -> None:
    engine, swap = swapping()
    assert swap.is_faster, "tried while nothing is known"
    swap._copy_seconds = [1e-3] * COPY_SAMPLES
    swap.observe(MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS * 1e-4)
    assert not swap.is_faster
    for _ in range(50):
        swap.observe(MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS * 1e-2)
    assert swap.is_faster
    swap.observe(MIN_PREFILL_TOKENS - 1, 0.0)
    assert swap.is_faster, "too few tokens are not measured"
