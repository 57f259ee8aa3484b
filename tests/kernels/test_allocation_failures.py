"""Every allocation of every native entry point fails once: an error each time, and the next call has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.draft.heads.block import BlockDrafter
from foretell.draft.heads.eagle import EagleDrafter
from foretell.draft.heads.medusa import MedusaDrafter
from foretell.draft.heads.sampling import pack_draft_sampling
from foretell.kernels.native.library import OUT_OF_MEMORY, library
from foretell.kernels.native.packed import PackedLinear
from foretell.runner.native.head_draft import DraftOptions, NativeBlock, NativeChain
from foretell.runner.native.head_prefill import PrefillRange
from foretell.sampling import noise
from foretell.sampling.native_sampler import pack_sampling_rows, sample_native
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft
from tests.heads.test_head_losslessness import remembered
from tests.heads.test_native import waiting
from tests.runner.test_native import LARGE, harness, text
from tests.tiny import HEADS

from .fault_injection import FaultyLibrary, faulty_library
from .test_quant import random_rows, random_weights

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")
Case = Callable[[], Any]
SAMPLING = [
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, min_p=0.1),
]


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyLibrary]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with faulty_library() as made:
            yield made
    finally:
        torch.set_num_threads(threads)


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


def linear(faulty: FaultyLibrary) -> Case:
    packed, x = PackedLinear(faulty, random_weights(8, 576, 960)), random_rows(40, 576)
    return lambda: bits(packed(x))


def step(faulty: FaultyLibrary) -> Case:
    """Prompts, a chain and a tree, in 8 bits: every kind of scratch memory that a step has."""
    made = harness(LARGE, 8)
    tree = Draft(tuple(text(5, LARGE.vocab)), (-1, 0, 0, 1, -1))
    parts = [(made.open(text(40, LARGE.vocab, i)), 30, draft) for i, draft in enumerate((Draft(), tree))]

    def run() -> list[int]:
        for seq, _, _ in parts:
            seq.num_computed_tokens = 0
        return bits(torch.cat(made.run(*parts)))

    return run


def chain(faulty: FaultyLibrary) -> Case:
    drafter, seqs = waiting(HEADS["eagle"], rules=("rejection",), temperature=1.0, top_k=9)
    assert isinstance(drafter, EagleDrafter) and isinstance(drafter._native, NativeChain)
    native, asked = drafter._native, drafter.native_request(seqs, drafter.new_chains([Budget(4)] * len(seqs)))
    drawing = DraftOptions(draws=pack_draft_sampling(seqs, 4), returns_probs=True)
    features = torch.randn(len(seqs), drafter.head.config.layer.width, generator=torch.Generator().manual_seed(0))

    def run() -> Any:
        found = native.draft(asked, features.clone(), drawing)
        assert found.probs is not None
        return found.tokens, found.confidence, bits(found.probs)

    return run


def blocks(faulty: FaultyLibrary) -> Case:
    drafter, seqs = waiting(HEADS["block"], temperature=0.0)
    assert isinstance(drafter, BlockDrafter) and isinstance(drafter._native, NativeBlock)
    native, asked = drafter._native, drafter.native_request(seqs, drafter.new_chains([Budget(3)] * len(seqs)))

    def run() -> Any:
        found = native.draft(asked)
        return found.tokens, found.confidence

    return run


def read(faulty: FaultyLibrary) -> Case:
    drafter, seqs = waiting(HEADS["eagle of two layers"])
    assert isinstance(drafter, EagleDrafter) and drafter._native_prefill is not None
    reader, config = drafter._native_prefill, drafter.head.config
    width = int(max(reader._columns)) + config.target_width
    rng = torch.Generator().manual_seed(0)
    readings = [
        PrefillRange(seq, 0, seq.num_computed_tokens, [torch.randn(seq.num_computed_tokens, width, generator=rng)])
        for seq in seqs
    ]

    def run() -> Any:
        reader.prefill(readings)
        return [bits(each) for seq in seqs for each in remembered(drafter, seq)]

    return run


def medusa(faulty: FaultyLibrary) -> Case:
    drafter, _ = waiting(HEADS["medusa"], temperature=0.0)
    assert isinstance(drafter, MedusaDrafter) and drafter._native is not None
    native, rng = drafter._native, torch.Generator().manual_seed(0)
    features = torch.randn(3, drafter.head.config.layer.width, generator=rng)

    def run() -> Any:
        found = native.draft(features, 2)
        return found.tokens, found.confidence

    return run


def choose(faulty: FaultyLibrary) -> Case:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(0))
    return lambda: sample_native(faulty, logits, SAMPLING * 10, list(range(30)), list(range(30)))


def odds(faulty: FaultyLibrary) -> Case:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(0))
    draws = pack_sampling_rows(SAMPLING * 10, [noise.key(i, 7) for i in range(30)])
    return lambda: faulty.race_topk(logits, torch.arange(500), draws, 8)


CASES = [linear, step, chain, blocks, read, medusa, choose, odds]


@pytest.mark.parametrize("make", CASES)
def test_each_allocation_that_fails_is_an_error_and_the_next_call_has_the_same_bits(
    make: Callable[[FaultyLibrary], Case], faulty: FaultyLibrary
) -> None:
    run = make(faulty)
    truth, failed = run(), 0
    for count in range(10_000):
        faulty.fail_allocation(count)
        try:
            assert run() == truth, "a failure that was survived, such as that of a thread, changes nothing"
        except MemoryError as error:
            assert "not enough memory" in str(error) and "\n" not in str(error)
            failed += 1
        if faulty.pending:  # there were no more allocations
            break
        assert run() == truth
    faulty.fail_allocation(-1)
    assert failed > 0 and run() == truth


@pytest.mark.parametrize("threads", [2, 3])
def test_a_failure_in_a_worker_thread_reaches_the_caller(threads: int, faulty: FaultyLibrary) -> None:
    run = linear(faulty)
    truth = run()
    for _ in range(3):
        assert faulty.hooks.foretell_fail_in_workers(threads) == OUT_OF_MEMORY
        assert run() == truth, "the workers go on"


def test_a_failed_sampling_call_costs_a_request_and_no_more(faulty: FaultyLibrary) -> None:
    """Without memory for the smallest call: the error is Python's own, and nothing is left half done."""
    run = choose(faulty)
    faulty.fail_allocation(0)
    with pytest.raises(MemoryError, match="sampling 30 rows of 500 scores"):
        run()
    assert len(run()) == 30
