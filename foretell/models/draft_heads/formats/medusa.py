"""Medusa heads in the formats of Medusa and vLLM."""

from __future__ import annotations

import re

from foretell.errors import ModelError
from foretell.models.draft_heads.config import LayerConfig, MedusaConfig

from .layout import HeadFile, TensorLayout

PREFIX = re.compile(r"^medusa_heads?\.")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
THEIR_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
THEIR_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


def medusa(file: HeadFile) -> TensorLayout:
    """Read Medusa heads. Heads and blocks are counted by tensors, because configs are often wrong about both."""
    blocks: dict[tuple[int, int], dict[str, str]] = {}
    outputs: dict[int, str] = {}
    for name in file.tensors:
        plain = PREFIX.sub("", name)
        if found := BLOCK.fullmatch(plain) or THEIR_BLOCK.fullmatch(plain):
            blocks.setdefault((int(found[1]), int(found[2])), {})[found[3]] = name
        elif found := OUTPUT.fullmatch(plain) or THEIR_OUTPUT.fullmatch(plain):
            outputs[int(found[1])] = name
    if not blocks:
        raise ModelError(f"{file.where}: no Medusa head found")
    heads, layers = 1 + max(head for head, _ in blocks), 1 + max(layer for _, layer in blocks)
    shared = "lm_head.weight" in file.tensors
    bias = "bias" in blocks[0, 0]
    width = file.shape(blocks[0, 0]["weight"])[0]
    ids = "token_map" if "token_map" in file.tensors else None
    config = MedusaConfig(
        LayerConfig(width, 1, 1, 2, 1),
        file.target.vocab,
        file.target.width,
        (file.target.layers,),
        target_norm=True,
        draft_vocab=None if ids is None else file.shape("token_map")[0],
        own_output=shared or bool(outputs),
        heads=heads,
        layers=layers,
        bias=bias,
        shared_output=shared,
    )
    tensors = {
        f"blocks.{head}.{layer}.{kind}": (name,)
        for (head, layer), kinds in blocks.items()
        for kind, name in kinds.items()
    }
    tensors |= {f"outputs.{head}.weight": (name,) for head, name in outputs.items()}
    tensors |= {"output.weight": ("lm_head.weight",)} if shared else {}
    return TensorLayout("Medusa", config, tensors, ids=ids)
