"""A small decoder and its shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from foretell.hub import Checkpoint
from foretell.models.decoder import Decoder
from foretell.models.load import materialize, meta_model
from foretell.models.sharding import Shard
from foretell.models.weights import fill_weights, map_parameters
from tests.models.checkpoints import folder as checkpoint_of


def saved(model: Decoder) -> dict[str, torch.Tensor]:
    """Return its tensors by their names in a checkpoint."""
    return {name: (slot.rows - slot.add).contiguous() for name, slot in map_parameters(model, is_gguf=False).items()}


def checkpoint(model: Decoder) -> Checkpoint:
    return checkpoint_of({}, saved(model))


def part_of(model: Decoder, shard: Shard) -> Decoder:
    """Return the shard that a rank loads."""
    part = materialize(meta_model(model.config, model.dtype, shard), torch.device("cpu"))
    with torch.no_grad():
        fill_weights(part, checkpoint(model))
    return part.eval()


def write_folder(model: Decoder, path: Path) -> Path:
    """Write the model to a folder, for processes to load; it has no tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    names = saved(model)
    save_file(
        {name if name.startswith("lm_head") else f"model.{name}": names[name] for name in names},
        path / "model.safetensors",
    )
    c = model.config
    config = {
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
