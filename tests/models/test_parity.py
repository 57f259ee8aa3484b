"""Every family gives transformers' logits, read at once or in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.hub import open_checkpoint
from foretell.models.load import load_model

from . import families
from .running import Reader, gap, greedy, logits


@pytest.mark.parametrize("name", families.MODELS)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = families.save(name, tmp_path), families.text()
    expected = families.theirs(model, tokens)
    reader = Reader(load_model(open_checkpoint(tmp_path)))
    for piece in (None, 7, 1):
        assert gap(logits(reader, tokens, piece), expected) < 2e-5
    assert greedy(reader, tokens, 8) == families.their_text(model, tokens, 8)
    assert expected.std() > 0.5, "logits are not all alike"
