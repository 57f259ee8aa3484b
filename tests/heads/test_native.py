"""The native library guesses what a head's own step, in torch, defines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.draft.heads.block import BlockDrafter
from foretell.draft.heads.eagle import EagleDrafter
from foretell.draft.heads.medusa import MedusaDrafter
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.library import library
from foretell.models.draft_heads import HeadConfig, TargetWeights
from foretell.models.draft_heads.loading import _quantize_for_cuda
from foretell.models.quantize import CudaQuantizedLinear
from foretell.types import Budget, Draft, Sequence, SpeculationChoice
from tests.heads.test_head_losslessness import remembered
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, random_head, tiny_decoder

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")
Served = EagleDrafter | BlockDrafter | MedusaDrafter
SERVED = {name: HEADS[name] for name in HEADS if name != "causal block"}
KEEPS = {name: config for name, config in SERVED.items() if name != "medusa"}


def waiting(
    config: HeadConfig, page_size: int = 4, rules: tuple[str, ...] = ("match",), **params: float
) -> tuple[Served, list[Sequence]]:
    """Texts of several lengths that could be guessed for now, in pages that do not lie side by side; they take turns
    with the rules."""
    engine = World(page_size=page_size, budget=2).engine(drafter := OwnHead(config, packed=True))
    choices = [SpeculationChoice(rule=rules[i % len(rules)]) for i in range(len(PROMPTS))]
    tracks = [add(engine, str(i), prompt, choices[i], **params)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(6):
        engine.step()
    seqs = [track.seq for track in tracks if track.seq.finish_reason is None]
    for seq in seqs:
        assert seq.pending == 1 and engine.runner.reserve(seq, len(seq.tokens) + 6)
    assert isinstance(drafter.inner, EagleDrafter | BlockDrafter | MedusaDrafter) and drafter.inner._native is not None
    return drafter.inner, seqs


def plainly(drafter: Served, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
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
def test_guesses_are_those_of_the_definition(config: HeadConfig, sampling: str, rules: tuple[str, ...]) -> None:
    drafter, seqs = waiting(config, rules=rules, **SAMPLING[sampling])
    budgets = [Budget(1 + i % 4, min_probability=0.001 * i) for i in range(len(seqs))]
    for some in (slice(0, 1), slice(1, 3), slice(None)):
        found = drafter.propose(seqs[some], budgets[some])
        defined = plainly(drafter, seqs[some], budgets[some])
        assert [draft.tokens for draft in found] == [draft.tokens for draft in defined] and found[0].tokens
        for mine, theirs in zip(found, defined, strict=True):
            assert mine.confidence == pytest.approx(theirs.confidence, rel=2e-2), "a rounded row may flip"
            assert mine.sampled == theirs.sampled and (mine.probs is None) == (theirs.probs is None)
            if mine.probs is not None and theirs.probs is not None:
                assert torch.allclose(mine.probs, theirs.probs, atol=1e-2)


@pytest.mark.parametrize("config", KEEPS.values(), ids=KEEPS)
def test_what_is_read_is_that_of_the_definition(config: HeadConfig) -> None:
    """Prompts in chunks, some of them one token long, and several texts at once."""
    kept = []
    for natively in (True, False):
        engine = World(max_step_tokens=7, budget=2).engine(drafter := OwnHead(config, packed=True))
        assert isinstance(drafter.inner, EagleDrafter | BlockDrafter) and drafter.inner._native_prefill is not None
        if not natively:
            drafter.inner._native_prefill = None
        tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
        for _ in range(9):
            engine.step()
        seqs = [track.seq for track in tracks if track.seq.cached]
        for seq in seqs:
            engine.runner.reserve(seq, len(seq.tokens) + 1)
        drafter.inner.propose(seqs, [Budget(1)] * len(seqs))
        kept.append([each for seq in seqs for each in remembered(drafter.inner, seq)])
    assert len(kept[0]) == len(kept[1]) > 8
    for mine, defined in zip(*kept, strict=True):
        assert mine.shape == defined.shape and (mine - defined).abs().max() < 0.05, "a rounded row may flip"


@pytest.mark.parametrize("name", ["eagle", "block", "distilled"])
def test_a_text_is_guessed_the_same_in_company(name: str) -> None:
    drafter, seqs = waiting(SERVED[name], page_size=16, temperature=0.0)
    together = drafter.propose(seqs, [Budget(4)] * len(seqs))
    for seq, draft in zip(seqs, together, strict=True):
        (alone,) = drafter.propose([seq], [Budget(4)])
        assert (alone.tokens, alone.confidence) == (draft.tokens, draft.confidence), "to the last bit"


def test_more_texts_than_there_is_spare_room_for_are_guessed_all_the_same() -> None:
    drafter, seqs = waiting(HEADS["block"], temperature=0.0)
    assert isinstance(drafter, BlockDrafter) and drafter._native is not None
    expected = [draft.tokens for draft in drafter.propose(seqs, [Budget(3)] * len(seqs))]
    drafter._native.max_sequences = 1
    assert [draft.tokens for draft in drafter.propose(seqs, [Budget(3)] * len(seqs))] == expected


@pytest.mark.parametrize(("name", "rounds"), [("eagle", True), ("eagle with a window", False)])
def test_what_reads_states_as_they_are_is_not_rounded_for_a_gpu(name: str, rounds: bool) -> None:
    """Of states without norms a few are a hundred times the others: on one grid the small ones would be lost."""
    head: Any = random_head(HEADS[name], TargetWeights.of(tiny_decoder()))
    assert isinstance(_quantize_for_cuda(head.fc, head, HugePageArena()), CudaQuantizedLinear) == rounds
    assert isinstance(_quantize_for_cuda(head.layers[0].ffn.down, head, HugePageArena()), CudaQuantizedLinear)
