"""A chain made on the device equals the one made token by token."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from foretell.kernels.triton.attention import parts
from foretell.params import SamplingParams
from foretell.runner.cuda import fit
from foretell.runner.cuda_chain import ChainSizes, CudaChain
from foretell.runner.cuda_forward import CudaForward
from foretell.runner.cuda_tables import PageTable
from foretell.runner.executor import EagerExecutor
from foretell.runner.pack import pack
from foretell.types import Draft, Request, Sequence, Share
from tests.kernels_triton.test_forward import BASE, DEVICE, world

PAGE, STEPS = 4, 4


def sequences(room: int) -> list[Sequence]:
    """Texts of several lengths, with as many tokens still to read, and pages for `room` more."""
    pages = [int(page) for page in np.random.default_rng(1).permutation(200)]
    found = []
    for number, (start, pending) in enumerate(((9, 1), (30, 2), (3, 3))):
        seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), [(5 * i + number) % 32 for i in range(start + pending)], start)
        seq.pages = [pages.pop() for _ in range(-(-(len(seq.tokens) + room) // PAGE))]
        found.append(seq)
    return found


@torch.inference_mode()
def one_by_one(vocab: int) -> tuple[list[list[int]], list[list[float]]]:
    model, cache, layout = world(BASE, PAGE, torch.float32)
    executor = EagerExecutor(model, cache, layout)
    seqs, sure = sequences(STEPS), [[] for _ in range(3)]  # type: ignore[var-annotated]
    before = [len(seq.tokens) for seq in seqs]
    for _ in range(STEPS):
        logits = executor(pack([Share.of(seq, seq.pending) for seq in seqs], [Draft()] * 3, PAGE), ()).logits[:, :vocab]
        for i, seq in enumerate(seqs):
            seq.cached = len(seq.tokens)
            seq.tokens.append(int(logits[i].argmax()))
            sure[i].append(float(logits[i].softmax(-1).max()))
    return [seq.tokens[n:] for seq, n in zip(seqs, before, strict=True)], sure


@pytest.mark.parametrize("vocab", [32, 9])
@torch.inference_mode()
def test_a_chain_equals_its_definition(vocab: int) -> None:
    model, cache, layout = world(BASE, PAGE, torch.float32)
    seqs = sequences(STEPS)
    packed = pack([Share.of(seq, seq.pending) for seq in seqs], [Draft()] * 3, PAGE)
    object.__setattr__(packed, "spans", [_with_all(span, seq) for span, seq in zip(packed.spans, seqs, strict=True)])
    sizes, tiles = fit(packed, layout.share)
    chain = CudaChain(CudaForward(model, cache), PageTable(8, 100, DEVICE), 16, PAGE)
    ends = [len(seq.pages) * PAGE for seq in seqs]
    found = chain(packed, tiles, ChainSizes(sizes, 16, parts(64), 4, STEPS, vocab), ends)
    expected = one_by_one(vocab)
    assert found[0] == expected[0]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_sequence_without_pages_stops_and_harms_nobody() -> None:
    model, cache, layout = world(BASE, PAGE, torch.float32)
    seqs = sequences(STEPS)
    packed = pack([Share.of(seq, seq.pending) for seq in seqs], [Draft()] * 3, PAGE)
    object.__setattr__(packed, "spans", [_with_all(span, seq) for span, seq in zip(packed.spans, seqs, strict=True)])
    sizes, tiles = fit(packed, layout.share)
    chain = CudaChain(CudaForward(model, cache), PageTable(8, 100, DEVICE), 16, PAGE)
    before = cache.keys[0].clone()
    found, _ = chain(packed, tiles, ChainSizes(sizes, 16, parts(64), 4, STEPS, 32), [len(seqs[0].tokens), 100, 100])
    expected, _ = one_by_one(32)
    assert found[1:] == expected[1:] and found[0][0] == expected[0][0]
    changed = (cache.keys[0] != before).flatten(2).any(-1).nonzero().tolist()
    own = {tuple(divmod(seq.pages[p // PAGE] * PAGE + p % PAGE, PAGE)) for seq in seqs[1:] for p in range(seq.cached, len(seq.tokens) + STEPS - 1)}
    own |= {(seqs[0].pages[9 // PAGE], 9 % PAGE)}
    assert {tuple(place) for place in changed} == own


def _with_all(span: object, seq: Sequence) -> object:
    from dataclasses import replace

    return replace(span, pages=tuple(seq.pages))  # type: ignore[type-var]
