"""Heads on a CUDA device: the text without a draft, and guesses that depend on it alone."""

from __future__ import annotations

import pytest
import torch

from foretell.draft.base import NoDrafter
from foretell.models.heads import HeadConfig
from tests.tiny import HEADS, OwnHead, World, generate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_never_changes_the_text(config: HeadConfig, packed: bool) -> None:
    world = World(device="cuda")
    for temperature in (0.0, 1.0):
        truth = generate(NoDrafter(), world, temperature=temperature)
        assert generate(OwnHead(config, packed=packed), world, temperature=temperature) == truth
