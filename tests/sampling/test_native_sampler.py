"""Drawing in one call draws what the definition draws."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foretell.kernels.native.library import library
from foretell.sampling import native_sampler as native_choice
from foretell.sampling import sampling
from foretell.sampling.native_sampler import sample_native
from foretell.sampling.sampling import SamplingRow, sample, sample_reference
from foretell.sampling_params import SamplingParams

native = library()
needs_native = pytest.mark.skipif(native is None, reason="no native library here")
SETTINGS = {
    "all": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.5),
    "cold": SamplingParams(temperature=0.1),
    "top p": SamplingParams(temperature=0.8, top_p=0.95),
    "hot top p": SamplingParams(temperature=2.0, top_p=0.99),
    "little p": SamplingParams(temperature=1.0, top_p=0.01),
    "top k": SamplingParams(temperature=1.0, top_k=40),
    "one": SamplingParams(temperature=1.0, top_k=1),
    "more than there are": SamplingParams(temperature=1.0, top_k=100_000),
    "min p": SamplingParams(temperature=1.0, min_p=0.05),
    "everything": SamplingParams(temperature=1.2, top_k=500, top_p=0.9, min_p=0.001),
}


def scores(rows: int, vocab: int, seed: int = 0) -> Tensor:
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    made[:, ::7] = -torch.inf  # what a grammar forbids
    return made


def sample_natively(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    assert native is not None
    settings = [row.params for row in rows], [row.seed for row in rows], [row.position for row in rows]
    return sample_native(native, logits, *settings)


@needs_native
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("vocab", [5, 64, 1000, 49_157])
def test_it_draws_what_the_definition_draws(params: SamplingParams, vocab: int) -> None:
    count = 24 if vocab > 1000 else 200
    logits = scores(count, vocab)
    rows = [SamplingRow(params, seed=i % 5, position=i) for i in range(count)]
    found, truth = sample_natively(logits, rows), sample_reference(logits, rows)
    assert len(set(truth)) > (1 if params.top_k == 1 or params.top_p < 0.1 else 2)
    assert sum(a != b for a, b in zip(found, truth, strict=True)) == 0


@needs_native
def test_equal_scores_share_the_edge_and_are_all_drawn() -> None:
    """Ties at an edge stay in: with top_k 1 of three equals each is sampled."""
    logits = torch.zeros(60, 100)
    logits[:, [3, 50, 99]] = 5.0
    for params in (SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_p=0.05)):
        rows = [SamplingRow(params, seed=1, position=i) for i in range(60)]
        assert set(sample_natively(logits, rows)) == {3, 50, 99}
        assert sample_natively(logits, rows) == sample_reference(logits, rows)


@needs_native
def test_a_row_draws_the_same_alone_in_a_batch_and_with_any_number_of_threads() -> None:
    logits = scores(30, 3000)
    rows = [SamplingRow(each, seed=i, position=i) for i, each in enumerate([*SETTINGS.values(), SamplingParams()] * 3)][
        :30
    ]
    together, threads = sample_natively(logits, rows), torch.get_num_threads()
    order = random.Random(0).sample(range(30), 30)
    assert [sample_natively(logits[i : i + 1], [rows[i]])[0] for i in range(30)] == together
    try:
        torch.set_num_threads(3)
        assert sample_natively(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    finally:
        torch.set_num_threads(threads)
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
    assert greedy and [together[i] for i in greedy] == logits[greedy].argmax(-1).tolist()


@needs_native
@pytest.mark.parametrize("score", [-torch.inf, torch.inf, torch.nan])
def test_a_row_without_finite_scores_leaves_the_other_rows_to_the_library(
    score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition may round differently: no row may change because of its neighbour."""
    logits = scores(6, 50)
    rows = [SamplingRow(SETTINGS["all"], 0, position) for position in range(6)]
    alone = sample(logits, rows)
    logits[3] = score
    defined = sample_reference(logits, rows)
    monkeypatch.setattr(sampling, "sample_reference", lambda *given: pytest.fail("a row went by the definition"))
    found = sample(logits, rows)
    assert found == defined and found[3] == 0
    assert [*found[:3], *found[4:]] == [*alone[:3], *alone[4:]]


def test_without_the_library_the_definition_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = scores(3, 50)
    rows = [SamplingRow(SETTINGS["top p"], 0, position) for position in range(3)]
    with_it = sample(logits, rows)
    monkeypatch.setattr(native_choice, "library", lambda: None)
    assert sample(logits, rows) == with_it == sample_reference(logits, rows)
