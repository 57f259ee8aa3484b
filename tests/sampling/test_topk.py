"""Top-k against torch."""

from __future__ import annotations

import pytest
import torch

from foretell.kernels.native.library import library
from foretell.sampling.sampling import topk

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here, so torch's own is used")


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 5127, 49152])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_it_is_what_torch_finds(vocab: int, count: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab + count))
    logits[1, -1] = 50.0
    logits[2] = logits[2].sort().values  # every one is better than all before it
    logits[3] = logits[3].sort(descending=True).values
    assert topk(logits, count) == logits.topk(min(count, vocab)).indices.tolist()


def test_what_a_grammar_forbids_comes_last() -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [3, 900, 901, 4999]] = torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert topk(logits, 6) == [[4999, 900, 901, 3, 0, 1]]


def test_rows_that_are_a_part_of_others() -> None:
    logits = torch.randn(4, 300)
    assert topk(logits[1:3, ::2], 3) == logits[1:3, ::2].topk(3).indices.tolist()
