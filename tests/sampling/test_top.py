"""The likeliest tokens, against torch."""

from __future__ import annotations

import pytest
import torch

from foretell.sampling.top import BLOCK, top


@pytest.mark.parametrize("vocab", [5, BLOCK * 3, BLOCK * 40, BLOCK * 40 + 7, 49152])
@pytest.mark.parametrize("count", [1, 8])
def test_it_is_what_torch_finds(vocab: int, count: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab + count))
    logits[1, -1] = 50.0  # behind the last whole block
    logits[2] = logits[2].sort().values  # all of them in the last blocks
    found = top(logits, count)
    assert found == logits.topk(min(count, vocab)).indices.tolist()


def test_what_a_grammar_forbids_is_never_among_them_while_others_are_left() -> None:
    logits = torch.full((1, BLOCK * 40), -torch.inf)
    allowed = [3, BLOCK * 7, BLOCK * 7 + 1, BLOCK * 39 + 5]
    logits[0, allowed] = torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert top(logits, 4) == [[BLOCK * 39 + 5, BLOCK * 7, BLOCK * 7 + 1, 3]]
