"""The first law in each data type of the KV cache: a draft never changes the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.kernels.kv_types import KV_TYPES
from foretell.kv.swap import Swap
from foretell.runner.executor import EagerExecutor
from tests.tiny import (
    HEADS,
    PROMPTS,
    OwnHead,
    World,
    early_exit,
    generate,
    model_drafter,
    quantized_self,
    random_tree,
    tree_around,
)

DRAFTERS: dict[str, Callable[[torch.dtype], Drafter]] = {
    "another model": lambda kv_dtype: model_drafter(seed=5, kv_dtype=kv_dtype),
    "early exit": lambda kv_dtype: early_exit(),
    "self int4": lambda kv_dtype: quantized_self("int4"),
    "random tree": lambda kv_dtype: ScriptedDrafter(random_tree),
    "tree around the output": lambda kv_dtype: tree_around(truth(kv_dtype)),
    "mix": lambda kv_dtype: MixDrafter([NGramDrafter(1, 3), model_drafter(seed=0, kv_dtype=kv_dtype)]),
} | {
    f"{name}{', packed' * packed}": lambda kv_dtype, config=config, packed=packed: OwnHead(config, packed=packed)
    for name, config in HEADS.items()
    for packed in (False, True)
}


@cache
def truth(kv_dtype: torch.dtype) -> list[list[int]]:
    """Return the outputs of plain decoding, one sequence at a time."""
    return generate(None, World(max_num_seqs=1, prefix_cache=False, kv_dtype=kv_dtype), temperature=1.0)


@pytest.mark.parametrize("kv_dtype", KV_TYPES[1:], ids=str)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_draft_never_changes_the_output(make: Callable[[torch.dtype], Drafter], kv_dtype: torch.dtype) -> None:
    rng = random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.1:
                engine.scheduler.preempt(seq)

    world = World(pages=60, kv_dtype=kv_dtype)
    assert generate(make(kv_dtype), world, preempt_some, temperature=1.0) == truth(kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_TYPES[1:], ids=str)
def test_the_reference_is_lossless_too(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.runner.model_runner.native_executor", lambda model, cache: None)
    world = World(kv_dtype=kv_dtype)
    assert isinstance(world.engine().runner.executor, EagerExecutor)
    plain = generate(None, World(max_num_seqs=1, prefix_cache=False, kv_dtype=kv_dtype))
    assert generate(tree_around(plain), world) == plain


@pytest.mark.parametrize("kv_dtype", KV_TYPES[1:], ids=str)
def test_swapped_pages_change_nothing(kv_dtype: torch.dtype) -> None:
    """Preempted sequences are swapped out and in again, as on a GPU."""
    swaps: list[Swap] = []

    def preempt_youngest(engine: Engine) -> None:
        if not swaps:
            engine.scheduler.swap = Swap(engine.runner.cache, 1 << 30)
            swaps.append(engine.scheduler.swap)
        if len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    found = generate(NGramDrafter(1, 3), World(kv_dtype=kv_dtype), preempt_youngest, temperature=1.0)
    assert found == truth(kv_dtype) and swaps[0].swapped_in > 0


def test_the_types_are_different_models() -> None:
    """Otherwise the tests above would compare float32 with itself."""
    assert len({tuple(map(tuple, truth(kv_dtype))) for kv_dtype in KV_TYPES}) > 1
    assert all(len(truth(kv_dtype)) == len(PROMPTS) for kv_dtype in KV_TYPES)
