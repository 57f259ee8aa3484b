"""A chain made on the device equals the one made token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from foretell.kernels.triton.row_tables import num_splits
from foretell.kv.cache import KVCache
from foretell.runner.batch_layout import pack
from foretell.runner.cuda.draft_chain import CudaChain
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import ChainShape, step_shape
from foretell.runner.cuda.graphs import GraphCache, capture_now
from foretell.runner.cuda.tables import PageTable
from foretell.runner.executor import EagerExecutor
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence
from tests.fake_graphs import FakeCapture
from tests.kernels_triton.test_forward import BASE, DEVICE, world

PAGE, STEPS = 4, 4


def sequences(room: int) -> list[Sequence]:
    """Sequences of several lengths, with as many tokens still to prefill, and pages for `room` more."""
    pages = [int(page) for page in np.random.default_rng(1).permutation(200)]
    found = []
    for number, (start, pending) in enumerate(((9, 1), (30, 2), (3, 3))):
        tokens = [(5 * i + number) % 32 for i in range(start + pending)]
        seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, start)
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
        logits = executor.forward(
            pack([ScheduledSequence.of(seq, seq.pending) for seq in seqs], [Draft()] * 3, PAGE), ()
        ).logits[:, :vocab]
        for i, seq in enumerate(seqs):
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens.append(int(logits[i].argmax()))
            sure[i].append(float(logits[i].softmax(-1).max()))
    return [seq.tokens[n:] for seq, n in zip(seqs, before, strict=True)], sure


def chain_of(
    seqs: list[Sequence],
    ends: list[int],
    vocab: int,
    steps: int = STEPS,
    recorded: int = 0,
    draws: SamplingBatch | None = None,
) -> tuple[tuple[list[list[int]], list[list[float]]], KVCache]:
    """The chains, and the cache they were written to. `recorded`: tokens of a chain that serves for them."""
    model, cache, layout = world(BASE, PAGE, torch.float32)
    packed = pack([ScheduledSequence.of(seq, seq.pending) for seq in seqs], [Draft()] * 3, PAGE)
    spans = [replace(span, pages=tuple(seq.pages)) for span, seq in zip(packed.spans, seqs, strict=True)]
    packed = replace(packed, spans=spans)
    sizes, tiles = step_shape(packed, layout.queries_per_kv_head)
    recorder: GraphCache[ChainShape, torch.Tensor] = (tape := FakeCapture()).recorder()
    chain = CudaChain(CudaForward(model, cache), PageTable(8, 100, DEVICE), 16, PAGE, recorder)
    wanted = ChainShape(sizes, 16, num_splits(64), 4, steps, vocab, draws is not None)
    if recorded:
        with capture_now():
            none = [0] * len(seqs)  # at their ends, nothing is run
            chain(packed, tiles, replace(wanted, steps=recorded), none, draws)
    found = chain(packed, tiles, wanted, ends, draws).wait()
    assert tape.count == bool(recorded)
    return found, cache


@pytest.mark.parametrize("vocab", [32, 9])
@torch.inference_mode()
def test_a_chain_equals_its_definition(vocab: int) -> None:
    seqs = sequences(STEPS)
    found, _ = chain_of(seqs, [len(seq.pages) * PAGE for seq in seqs], vocab)
    expected = one_by_one(vocab)
    assert found[0] == expected[0]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_sequence_without_pages_stops_and_leaves_others_alone() -> None:
    seqs = sequences(STEPS)
    _, before, _ = world(BASE, PAGE, torch.float32)
    (found, _), cache = chain_of(seqs, [len(seqs[0].tokens), 100, 100], 32)
    expected, _ = one_by_one(32)
    assert found[1:] == expected[1:]
    assert found[0][0] == expected[0][0]
    changed = (cache.keys[0] != before.keys[0]).flatten(2).any(-1).nonzero().tolist()
    written = {seq.id: range(seq.num_computed_tokens, len(seq.tokens) + STEPS - 1) for seq in seqs} | {0: range(9, 10)}
    own = {(seq.pages[place // PAGE], place % PAGE) for seq in seqs for place in written[seq.id]}
    assert {tuple(place) for place in changed} == own


@pytest.mark.parametrize("sampled", [False, True])
@torch.inference_mode()
def test_a_longer_captured_chain_runs_only_the_wanted_steps(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.runner.cuda.graph_shapes.CAPTURE_CONTEXTS", (64,))
    seqs = sequences(STEPS)
    ends = [len(seq.pages) * PAGE for seq in seqs]
    warm = SamplingParams(temperature=1.0, top_p=0.9)
    draws = SamplingBatch([warm] * 3, [1, 2, 3], [len(seq.tokens) for seq in seqs]) if sampled else None
    (alone, sure), cache = chain_of(seqs, ends, 32, 1, draws=draws)
    (served, as_sure), other = chain_of(seqs, ends, 32, 1, recorded=2, draws=draws)
    assert served == alone and as_sure == sure
    for mine, its in zip((*other.keys, *other.values), (*cache.keys, *cache.values), strict=True):
        assert torch.equal(mine, its)
