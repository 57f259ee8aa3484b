"""The tiny model as a quantized checkpoint, and the same with the weights that its layers stand for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.folder import Shape, write_tiny_folder
from tests.hub.formats import FORMATS

SHAPE = Shape(width=64, ffn=96)


def write_quantized_folder(path: Path, name: str, shape: Shape = SHAPE, mtp: bool = False) -> tuple[Path, Path]:
    """Write the model in one of FORMATS, with an output layer that is not quantized.

    With `mtp` it has an MTP module whose linear layers are quantized, but for the one that joins its inputs.

    Return its folder and that of the same model in float32.
    """
    plain, packed = write_tiny_folder(path / "plain", shape=shape), write_tiny_folder(path / "packed", shape=shape)
    weights = load_file(plain / "model.safetensors")
    weights["lm_head.weight"] = torch.flip(weights["model.embed_tokens.weight"], [0]).contiguous()
    if mtp:
        layer = {key: torch.roll(values, 1, 0) for key, values in weights.items() if "layers.0" in key}
        weights |= {key.replace("model.", "mtp."): values for key, values in layer.items()}
        weights["mtp.fc.weight"] = torch.randn(shape.width, 2 * shape.width)
        norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        weights |= {f"{norm}.weight": torch.ones(shape.width) for norm in norms}
    stored = dict(weights)
    for key in [key for key in weights if "proj" in key]:
        parts, weights[key] = FORMATS[name].pack(stored.pop(key))
        stored |= {key.removesuffix("weight") + part: values.contiguous() for part, values in parts.items()}
    config = json.loads((plain / "config.json").read_text()) | {"tie_word_embeddings": False}
    (plain / "config.json").write_text(json.dumps(config))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[name].config}))
    save_file({key: values.contiguous() for key, values in weights.items()}, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    return packed, plain
