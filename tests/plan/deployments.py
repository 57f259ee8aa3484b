"""Deployed models for tests of plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.plan.devices import find_device
from foretell.plan.model_shape import ModelShape, find_model_shape, from_hf
from foretell.plan.steps import DeployedModel, Efficiency, cache_bytes, default_efficiency, precision_of

DATA = Path(__file__).parent / "data"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def deployed(
    model: str | ModelShape, gpu: str = "h100", split: int = 1, efficiency: Efficiency | None = None
) -> DeployedModel:
    shape = find_model_shape(model, "target") if isinstance(model, str) else model
    device = find_device(gpu)
    chosen = efficiency or default_efficiency(device.family)
    return DeployedModel(
        shape, precision_of("auto", shape, "dtype"), cache_bytes("auto", device.family), device, chosen, split
    )


def measured(name: str) -> tuple[Path, DeployedModel, DeployedModel]:
    """Return the file of a measured run, its target and its draft model."""
    path = DATA / f"{name}.json"
    run = json.loads(path.read_text())
    return path, deployed(from_hf("target", run["target"]), "h200"), deployed(from_hf("draft", run["draft"]), "h200")
