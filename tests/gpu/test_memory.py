"""Memory of a CUDA device: preemption, steps that run out of memory, and the memory plan."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from foretell import LLM
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.engine import Engine
from foretell.engine.scheduler import STEPS_TO_RESTORE
from foretell.errors import CapacityError
from foretell.runner.cuda.graphs import CAPTURE_BACKOFF, GraphCapture
from foretell.runner.memory_plan import GIB, MemoryPlan
from tests.engine.test_swap import (
    DRAFTERS,
    PREFILLS,
    TIGHT,
    measures_and_chooses,
    restores_kv,
    swaps_and_changes_nothing,
)
from tests.memory_folder import PARAMS, PROMPTS, write_model_and_head
from tests.tiny import CONFIG, World, add, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
SEGMENT = 20 * MIB  # that torch's allocator takes for a tensor of 1 to 10 MiB
FILLER = 3 * MIB // 2
# 64 rows have logits of 8 MiB; up to 8 rows take their memory 2 MiB at a time.
WIDE = World(config=replace(CONFIG, vocab=32768), device="cuda", pages=512, max_num_seqs=24, max_step_tokens=64)
MANY = [[1 + i % 7, 2 + i % 11, 3 + i % 13] for i in range(24)]


def free_memory() -> None:
    """Free unused memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def taken() -> int:
    """Return the bytes of the device that are not free."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model_and_head(tmp_path_factory.mktemp("models"))


def open_llm(folders: tuple[Path, Path], **options: Any) -> LLM:
    settings = {"device": "cuda", "dtype": "float32", "max_num_seqs": 32, "num_speculative_tokens": 4, **options}
    return LLM(folders[0], drafter=f"eagle:{folders[1]}", quiet=True, **settings)


def print_memory(name: str, plan: MemoryPlan, used: int) -> None:
    """Print a figure."""
    parts = {"weights": plan.weights, "drafter": plan.drafter, "workspace": plan.workspace, "cache": plan.cache}
    whole = {**parts, "planned": plan.total, "used": used, "reserved": torch.cuda.memory_reserved()}
    print(json.dumps({"memory": name, **{part: round(size / MIB, 1) for part, size in whole.items()}}))


def test_no_more_memory_is_used_than_planned(folders: tuple[Path, Path]) -> None:
    """The first of all tests, so that kernels and libraries count, too."""
    free_memory()
    before = taken()
    roomy = open_llm(folders).assembly.memory
    free_memory()
    few = (roomy.total - roomy.cache * 7 // 8) / torch.cuda.mem_get_info()[0]
    llm = open_llm(folders, gpu_memory_utilization=few, swap_space=1.0)
    plan, scheduler, swap = llm.assembly.memory, llm.engine.scheduler, llm.engine.scheduler.swap
    assert plan.cache < roomy.cache // 4, "it takes the little that is left"
    print_memory("after the start", plan, used := taken() - before)
    assert used <= plan.total
    found = written(llm)
    assert swap is not None and scheduler.preemptions > 0
    print(f"{scheduler.preemptions} preempted, {swap.swapped_out} swapped out, {swap.swapped_in} swapped in")
    print_memory("after a burst", plan, used := taken() - before)
    assert used <= plan.total
    assert llm.engine.stats.drafter_failures == 0 and llm.engine.oom_backoff.num_ooms == 0
    del llm, scheduler, swap
    free_memory()
    assert written(open_llm(folders)) == found


def written(llm: LLM) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, PARAMS)]


def test_a_model_that_does_not_fit_is_refused_before_loading(folders: tuple[Path, Path]) -> None:
    free_memory()
    before = taken()
    with pytest.raises(CapacityError, match="raise gpu_memory_utilization"):
        open_llm(folders, gpu_memory_utilization=0.0005)
    with pytest.raises(CapacityError, match="lower kv_memory"):
        open_llm(folders, kv_memory=1000.0)
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 100 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(CapacityError, match="free some memory"):
        open_llm(folders)
    del ballast
    free_memory()
    assert taken() <= before + 2 * MIB, "nothing was allocated"


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_swapped_sequence_continues_as_if_it_had_stayed(make: Callable[[str], Drafter], prefix: bool) -> None:
    swaps_and_changes_nothing(make, replace(TIGHT, device="cuda", prefix_cache=prefix))


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_swapped_pages_come_back_unchanged(make: Callable[[str], Drafter]) -> None:
    restores_kv(make, "cuda")


def test_the_cost_of_swapping_is_measured() -> None:
    print("copying pays" if measures_and_chooses(replace(PREFILLS, device="cuda")) else "reading again pays")


def fill(most: int) -> list[torch.Tensor]:
    """Allocate what is left in torch's pool, and up to `most` bytes beyond."""
    held: list[torch.Tensor] = []
    try:
        while len(held) * FILLER < most:
            held.append(torch.empty(FILLER, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    return held


@contextmanager
def allowed_no_more() -> Iterator[None]:
    """Leave torch too little memory for large steps."""
    free_memory()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SEGMENT - 2 * MIB) / total)
    held = fill(GIB)
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        free_memory()


@contextmanager
def full_device() -> Iterator[None]:
    """Leave the device itself too little memory."""
    free_memory()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(free - 2 * SEGMENT + 2 * MIB, dtype=torch.uint8, device="cuda")]
    held += fill(GIB)
    try:
        yield
    finally:
        held.clear()
        free_memory()


SHORTAGES = {"allowed no more": allowed_no_more, "a full device": full_device}
GUESSING: dict[str, Callable[[], Drafter]] = {"none": lambda: MixDrafter([]), "ngram": lambda: NGramDrafter(1, 3)}


def texts(engine: Engine, **params: object) -> list[list[int]]:
    asked = {"ignore_eos": True, "max_tokens": 40, **params}
    tracks = [
        track
        for i, prompt in enumerate(MANY)
        for track in add(engine, str(i), prompt, temperature=float(i % 2), **asked)
    ]
    run(engine)
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    return texts(WIDE.engine())


@pytest.mark.parametrize("make", GUESSING.values(), ids=GUESSING)
@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_without_memory_for_a_step_sequences_continue_in_smaller_ones(
    shortage: Callable[[], Any], make: Callable[[], Drafter], truth: list[list[int]]
) -> None:
    engine = WIDE.engine(make())
    scheduler = engine.scheduler
    whole = (scheduler.max_num_seqs, scheduler.max_step_tokens)
    add(engine, "0", MANY[0])
    run(engine)
    with shortage():
        assert texts(engine) == truth
        assert engine.oom_backoff.num_ooms > 0
    assert engine.runner.pool.num_held == 0
    sheds = engine.oom_backoff.num_ooms
    for _ in range(12 * STEPS_TO_RESTORE // 40):
        assert texts(engine) == truth
    assert engine.oom_backoff.num_ooms == sheds
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == whole, "larger steps are back"
    recordings: dict[Any, Any] = engine.runner.executor.graph_cache(engine.runner.hidden_layers).graphs  # type: ignore[attr-defined]
    assert any(recording is not None for recording in recordings.values()), "and steps are captured"


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_a_failed_capture_is_dropped_and_harms_nothing(shortage: Callable[[], Any]) -> None:
    capture, counted = GraphCapture(torch.device("cuda")), torch.zeros(8, device="cuda")

    def hungry() -> torch.Tensor:
        counted.add_(1)
        return torch.empty(8 * MIB, device="cuda")

    first = capture.capture(lambda: counted.add_(1))
    assert first is not None
    with shortage():
        assert capture.capture(hungry) is None and capture.failures == 1
        torch.randn(4, device="cuda")  # it is not part of a capture
        first[0].replay()
    assert counted.tolist() == [1.0] * 8, "captured work does not run"
    assert all(capture.capture(hungry) is None for _ in range(CAPTURE_BACKOFF)), "it is not tried again at once"
    again = capture.capture(hungry)
    assert again is not None and capture.failures == 1
    again[0].replay()
    first[0].replay()
    assert counted.tolist() == [3.0] * 8
