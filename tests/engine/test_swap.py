"""Texts that make way and come back by copy are what they would be if they were read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.draft.base import Drafter, NoDrafter
from foretell.engine.engine import Engine
from foretell.kv import swap as module
from foretell.kv.cache import slots_of
from foretell.kv.swap import COPY_SAMPLES, MIN_PREFILL_TOKENS, Swap
from foretell.types import Sequence
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, model_drafter, run

TIGHT = World(page_size=4, pages=14, max_num_seqs=5, prefix_cache=False)
READING = World(page_size=4, pages=100, max_step_tokens=128, prefix_cache=False)
LONG = [[(7 * i + 3 * text) % 31 + 1 for i in range(66 + text)] for text in range(8)]
WRITING: dict[str, object] = {"ignore_eos": True, "max_tokens": 60}

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "none": lambda device: NoDrafter(),
    "model": lambda device: model_drafter(seed=5, device=device),
    "eagle": lambda device: OwnHead(HEADS["eagle"]),
    "block": lambda device: OwnHead(HEADS["block"]),
}


def swapping(world: World = TIGHT, drafter: Drafter | None = None, room: int = 1 << 30) -> tuple[Engine, Swap]:
    engine = world.engine(drafter)
    engine.scheduler.swap = swap = Swap(engine.runner.cache, room)
    return engine, swap


def written(engine: Engine, prompts: list[list[int]] = PROMPTS, **params: object) -> list[list[int]]:
    tracks = [track for i, prompt in enumerate(prompts) for track in add(engine, str(i), prompt, **params)]
    run(engine)
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def swaps_and_changes_nothing(make: Callable[[str], Drafter], world: World) -> None:
    """Without making way, making way and reading again, and by copy: the same texts."""
    for temperature in (0.0, 1.0):
        truth = generate(None, World(device=world.device), temperature=temperature)
        assert generate(make(world.device), world, temperature=temperature) == truth
        engine, swap = swapping(world, make(world.device))
        assert written(engine, temperature=temperature) == truth
        assert engine.scheduler.preemptions > 0
        assert swap.swapped_out >= swap.swapped_in > 0
        assert swap.used == 0, "nothing is left behind"


def comes_back_as_it_was(make: Callable[[str], Drafter], device: str) -> None:
    """All that lies in a text's pages, of heads too: bit by bit, though others wrote there meanwhile."""
    world = World(page_size=4, prefix_cache=False, device=device)
    truth = generate(None, World(device=device))
    engine, swap = swapping(world, make(device))
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    for _ in range(4):
        engine.step()
    seqs = [track.seq for track in tracks if track.seq.finish_reason is None]
    assert len(seqs) > 2
    before = [(seq.cached, lying(engine, seq, seq.cached)) for seq in seqs]
    for seq in engine.scheduler.running[::-1]:
        engine.scheduler.preempt(seq)
    for tensor in engine.runner.cache.tensors:
        tensor.fill_(7.0)
    engine.scheduler.schedule([])
    assert swap.swapped_in == len(seqs)
    for seq, (cached, tensors) in zip(seqs, before, strict=True):
        assert seq.cached == cached
        assert all(map(torch.equal, lying(engine, seq, cached), tensors))
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth


def lying(engine: Engine, seq: Sequence, tokens: int) -> list[Tensor]:
    """What the pages of a text hold of its first tokens."""
    slots = slots_of(seq.pages, engine.runner.pool.page_size, 0, tokens)
    return [tensor.flatten(0, 1)[slots].clone() for tensor in engine.runner.cache.tensors]


def measures_and_chooses(world: World) -> bool:
    """Texts are the same whether copying pays, does not, or is found out on the way; which it is here."""
    truth = generate(None, replace(world, pages=512), prompts=LONG, **WRITING)
    for seconds, copies in ((0.0, True), (1e9, False)):
        engine, swap = swapping(world)
        swap._copy_seconds, swap._prefill_seconds = [seconds] * COPY_SAMPLES, 1.0
        assert written(engine, LONG, **WRITING) == truth
        assert engine.scheduler.preemptions > COPY_SAMPLES
        assert (swap.swapped_out > 0) == copies
    engine, swap = swapping(world)
    assert written(engine, LONG, **WRITING) == truth
    assert swap._prefill_seconds is not None and swap._prefill_seconds > 0, "steps that read are timed"
    assert len(swap._copy_seconds) == COPY_SAMPLES and min(swap._copy_seconds) > 0, "and so are the first copies"
    assert swap.swapped_out >= COPY_SAMPLES
    return swap.is_faster


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_copied_text_goes_on_as_if_it_had_stayed(make: Callable[[str], Drafter], prefix: bool) -> None:
    swaps_and_changes_nothing(make, replace(TIGHT, prefix_cache=prefix))


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_pages_come_back_as_they_were(make: Callable[[str], Drafter]) -> None:
    comes_back_as_it_was(make, "cpu")


def test_what_is_brought_back_is_not_read_again() -> None:
    engine, swap = swapping()
    written(engine)
    plain = TIGHT.engine()
    written(plain)
    assert swap.swapped_in > 0
    assert engine.stats.rows < plain.stats.rows


def test_without_room_texts_are_read_again() -> None:
    engine, swap = swapping(room=1)
    assert written(engine) == generate(None, World())
    assert swap.swapped_out == 0


def test_without_memory_for_a_copy_texts_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    truth = generate(None, World())
    engine, swap = swapping()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_to_host", fails)
        assert written(engine) == truth
        assert swap.swapped_out == swap.used == 0 and engine.scheduler.preemptions > 0
    engine, swap = swapping()
    monkeypatch.setattr(module, "_to_device", fails)
    assert written(engine) == truth
    assert swap.swapped_out > 0 and swap.swapped_in == swap.used == 0


def test_the_choice_is_measured() -> None:
    measures_and_chooses(READING)


def test_copies_are_made_only_where_they_are_faster() -> None:
    engine, swap = swapping()
    assert swap.is_faster, "tried while nothing is known"
    swap._copy_seconds = [1e-3] * COPY_SAMPLES
    swap.observe(MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS * 1e-4)
    assert not swap.is_faster
    for _ in range(50):
        swap.observe(MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS * 1e-2)
    assert swap.is_faster
    swap.observe(MIN_PREFILL_TOKENS - 1, 0.0)
    assert swap.is_faster, "too few tokens tell nothing"
