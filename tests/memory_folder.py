"""A model whose steps need some memory and a head for it, as folders, and prompts that compete for pages."""

from __future__ import annotations

from pathlib import Path

import torch

from foretell import SamplingParams
from foretell.models.draft_heads import EagleConfig, LayerConfig, make_head, write_head
from foretell.models.draft_heads.layer import init_weights
from tests.folder import Shape, write_tiny_folder

SHAPE = Shape(width=512, layers=3, heads=8, kv_heads=4, ffn=1024, context=2048, vocab=32768)
PROMPTS = [[(7 * i + 11 * n) % 300 + 2 for i in range(40 + 37 * (n % 32))] for n in range(48)]
PARAMS = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)


def write_model_and_head(into: Path, shape: Shape = SHAPE) -> tuple[Path, Path]:
    """Write a model and a head, and return their folders."""
    assert shape.vocab is not None, "the head has the same vocabulary"
    layer = LayerConfig(shape.width, shape.heads, shape.kv_heads, shape.width // shape.heads, shape.ffn)
    head = make_head(EagleConfig(layer, shape.vocab, shape.width, (0, 1, shape.layers)))
    init_weights(head, torch.Generator().manual_seed(0), spread=0.05)
    write_head(head, into / "head")
    return write_tiny_folder(into / "model", shape=shape), into / "head"
