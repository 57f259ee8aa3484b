"""The native library drafts the same tokens as the reference implementation in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.draft.heads.block import BlockDrafter
from foretell.draft.heads.eagle import EagleDrafter
from foretell.draft.heads.medusa import MedusaDrafter
from foretell.kernels.kv_types import KV_TYPES
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.library import library
from foretell.models.draft_heads import HeadConfig, TargetWeights
from foretell.models.draft_heads.loading import _quantize_for_cuda
from foretell.models.quantize import CudaQuantizedLinear
from foretell.types import Budget, Draft, Sequence, SpeculationChoice
from tests.heads.test_head_losslessness import remembered
from tests.tiny import HEADS, PROMPTS, WITH_CACHE, OwnHead, World, add, random_head, tiny_decoder

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")
Served = EagleDrafter | BlockDrafter | MedusaDrafter
SERVED = {name: HEADS[name] for name in WITH_CACHE if name != "causal block"}
KEEPS = {name: config for name, config in SERVED.items() if name != "medusa"}


def waiting(
    config: HeadConfig,
    page_size: int = 4,
    rules: tuple[str, ...] = ("match",),
    kv_dtype: torch.dtype | None = None,
    **params: float,
) -> tuple[Served, list[Sequence]]:
    """Return decoding sequences of several lengths, in scattered pages; they alternate
    with the rules."""
    engine = World(page_size=page_size, budget=2, kv_dtype=kv_dtype).engine(drafter := OwnHead(config, packed=True))
    choices = [SpeculationChoice(rule=rules[i % len(rules)]) for i in range(len(PROMPTS))]
    states = [add(engine, str(i), prompt, choices[i], **params)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(6):
        engine.step()
    seqs = [state.seq for state in states if state.seq.finish_reason is None]
    for seq in seqs:
        assert seq.pending == 1 and engine.runner.reserve(seq, len(seq.tokens) + 6)
    assert isinstance(drafter.inner, EagleDrafter | BlockDrafter | MedusaDrafter) and drafter.inner._native is not None
    return drafter.inner, seqs


def in_torch(drafter: Served, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
    native, drafter._native = drafter._native, None
    try:
        return drafter.propose(seqs, budgets)
    finally:
        drafter._native = native  # type: ignore[assignment]


SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "restricted": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "near zero": {"temperature": 1e-37},
    "uniform": {"temperature": 1e300, "top_p": 1e-300},
}


@pytest.mark.parametrize("rules", [("match",), ("rejection",), ("match", "block")], ids="-".join)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
def test_native_drafts_equal_the_reference(config: HeadConfig, sampling: str, rules: tuple[str, ...]) -> None:
    drafter, seqs = waiting(config, rules=rules, **SAMPLING[sampling])
    budgets = [Budget(1 + i % 4, min_probability=0.001 * i) for i in range(len(seqs))]
    for some in (slice(0, 1), slice(1, 3), slice(None)):
        found = drafter.propose(seqs[some], budgets[some])
        defined = in_torch(drafter, seqs[some], budgets[some])
        assert [draft.tokens for draft in found] == [draft.tokens for draft in defined] and found[0].tokens
        for mine, theirs in zip(found, defined, strict=True):
            assert mine.confidence == pytest.approx(theirs.confidence, rel=2e-2), "quantization may flip a row"
            assert mine.sampled == theirs.sampled and (mine.probs is None) == (theirs.probs is None)
            if mine.probs is not None and theirs.probs is not None:
                assert torch.allclose(mine.probs, theirs.probs, atol=1e-2)


@pytest.mark.parametrize("kv_dtype", KV_TYPES[1:], ids=str)
@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
def test_native_drafts_equal_the_reference_in_each_type_of_kv(config: HeadConfig, kv_dtype: torch.dtype) -> None:
    drafter, seqs = waiting(config, kv_dtype=kv_dtype, temperature=0.0)
    budgets = [Budget(1 + i % 4) for i in range(len(seqs))]
    found = drafter.propose(seqs, budgets)
    defined = in_torch(drafter, seqs, budgets)
    assert [draft.tokens for draft in found] == [draft.tokens for draft in defined] and found[0].tokens
    for mine, theirs in zip(found, defined, strict=True):
        assert mine.confidence == pytest.approx(theirs.confidence, rel=5e-2), "rounding may flip a row or a key"


@pytest.mark.parametrize("config", KEEPS.values(), ids=KEEPS)
def test_native_prefill_equals_the_reference(config: HeadConfig) -> None:
    """Prompts in chunks, some of one token, and several sequences at once."""
    kept = []
    for natively in (True, False):
        engine = World(max_step_tokens=7, budget=2).engine(drafter := OwnHead(config, packed=True))
        assert isinstance(drafter.inner, EagleDrafter | BlockDrafter) and drafter.inner._native_prefill is not None
        if not natively:
            drafter.inner._native_prefill = None
        states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
        for _ in range(9):
            engine.step()
        seqs = [state.seq for state in states if state.seq.num_computed_tokens]
        for seq in seqs:
            engine.runner.reserve(seq, len(seq.tokens) + 1)
        drafter.inner.propose(seqs, [Budget(1)] * len(seqs))
        kept.append([each for seq in seqs for each in remembered(drafter.inner, seq)])
    assert len(kept[0]) == len(kept[1]) > 8
    for mine, defined in zip(*kept, strict=True):
        assert mine.shape == defined.shape and (mine - defined).abs().max() < 0.05, "quantization may flip a row"


@pytest.mark.parametrize("name", ["eagle", "block", "distilled"])
def test_a_draft_is_batch_invariant(name: str) -> None:
    drafter, seqs = waiting(SERVED[name], page_size=16, temperature=0.0)
    together = drafter.propose(seqs, [Budget(4)] * len(seqs))
    for seq, draft in zip(seqs, together, strict=True):
        (alone,) = drafter.propose([seq], [Budget(4)])
        assert (alone.tokens, alone.confidence) == (draft.tokens, draft.confidence), "bit for bit"


def test_batches_above_the_native_limit_are_drafted_in_torch() -> None:
    drafter, seqs = waiting(HEADS["block"], temperature=0.0)
    assert isinstance(drafter, BlockDrafter) and drafter._native is not None
    expected = [draft.tokens for draft in drafter.propose(seqs, [Budget(3)] * len(seqs))]
    drafter._native.max_sequences = 1
    assert [draft.tokens for draft in drafter.propose(seqs, [Budget(3)] * len(seqs))] == expected


@pytest.mark.parametrize(("name", "rounds"), [("eagle", True), ("eagle with a window", False)])
def test_layers_that_read_raw_hidden_states_are_not_quantized_for_a_gpu(name: str, rounds: bool) -> None:
    """A few raw hidden states are a hundred times the others: with one scale, the small ones would be lost."""
    head: Any = random_head(HEADS[name], TargetWeights.of(tiny_decoder()))
    assert isinstance(_quantize_for_cuda(head.fc, head, HugePageArena()), CudaQuantizedLinear) == rounds
    assert isinstance(_quantize_for_cuda(head.layers[0].ffn.down, head, HugePageArena()), CudaQuantizedLinear)
