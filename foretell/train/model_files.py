"""A decoder as a model folder that others read too: config.json, model.safetensors and the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from foretell.build.model_source import ModelSource
from foretell.errors import UnsupportedModelError
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.hf_config import eos_token_ids
from foretell.models.weights import map_parameters


def check_writable(opened: ModelSource) -> None:
    """Refuse a model whose config we could not say, before it is trained."""
    plain = opened.config.family == "llama" and opened.config.ropes[0].kind == "default"
    if opened.checkpoint.kind == "gguf" and not plain:
        raise UnsupportedModelError(f"a GGUF file of the family {opened.config.family} cannot be written as a folder")


def write_model(model: Decoder, opened: ModelSource, folder: Path) -> None:
    """The model with its own names, in its own type."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, slot in map_parameters(model, is_gguf=False).items():
        values = slot.rows.detach().cpu()
        full = name if name.startswith("lm_head") else f"model.{name}"
        tensors[full] = (values - slot.add if slot.add else values).contiguous().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = dict(opened.checkpoint.config) if opened.checkpoint.kind == "folder" else _llama(opened.config)
    _write(folder / "config.json", said | {"torch_dtype": str(model.dtype).removeprefix("torch.")})
    _write(
        folder / "generation_config.json", {"eos_token_id": sorted(eos_token_ids(opened.checkpoint) | _ends(opened))}
    )
    for name, text in _tokenizer_files(opened).items():
        (folder / name).write_text(text, encoding="utf-8")


def architectures(opened: ModelSource) -> list[str]:
    """What transformers calls the model's class."""
    said = opened.checkpoint.config.get("architectures")
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
    return list(said) if isinstance(said, list) else [f"{names[opened.config.family]}ForCausalLM"]


def _ends(opened: ModelSource) -> frozenset[int]:
    return opened.tokenizer.end_ids


def _llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _tokenizer_files(opened: ModelSource) -> dict[str, str]:
    if opened.checkpoint.kind == "folder":
        return dict(opened.checkpoint.tokenizer_files)
    tokenizer = opened.tokenizer
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    if tokenizer.bos_id is not None:
        said["bos_token"] = tokenizer.piece(tokenizer.bos_id)
    if tokenizer.end_ids:
        said["eos_token"] = tokenizer.piece(min(tokenizer.end_ids))
    return {"tokenizer.json": tokenizer.as_json(), "tokenizer_config.json": json.dumps(said, indent=1)}


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
