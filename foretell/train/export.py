"""Export of EAGLE-3 heads for vLLM and SGLang, and of tuned models as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.build.model_source import ModelSource
from foretell.errors import RequestError, UnsupportedModelError
from foretell.models.checkpoint_tensors import FUSED
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder, has_plain_logits
from foretell.models.draft_heads import DraftHead, EagleConfig, EagleHead, LayerConfig, TargetWeights
from foretell.models.draft_heads.formats.layout import layer_tensors
from foretell.models.families import MULTIMODAL
from foretell.models.hf_config import eos_token_ids
from foretell.models.weights import map_parameters

SPECULATIVE_TOKENS = 5  # suggested draft tokens per step in the exported config
SPECULATORS_VERSION = "0.3.0"  # of the speculators format


CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "granite": "Granite",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "exaone4": "Exaone4",
    "seed_oss": "SeedOss",
}


def check_writable(source: ModelSource) -> None:
    """Refuse, before training, a model whose config.json could not be written."""
    model_type = source.checkpoint.config.get("model_type")
    if model_type in MULTIMODAL or source.config.family in FUSED or not has_plain_logits(source.config):
        raise UnsupportedModelError(
            f"a model of type {model_type} cannot be tuned: its weights are fused or its logits scaled; train a head"
        )
    supported = source.config.family == "llama" and source.config.ropes[0].kind == "default"
    if source.checkpoint.kind == "gguf" and not supported:
        family = source.config.family
        raise UnsupportedModelError(f"a GGUF file of family {family} cannot be tuned; name its safetensors folder")


def write_model(model: Decoder, source: ModelSource, folder: Path) -> None:
    """Write a Hugging Face folder: config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, slot in map_parameters(model, is_gguf=False).items():
        values = slot.rows.detach().cpu()
        full = name if name.startswith("lm_head") else f"model.{name}"
        tensors[full] = (values - slot.add if slot.add else values).contiguous().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    is_folder = source.checkpoint.kind == "folder"
    config = dict(source.checkpoint.config) if is_folder else _llama_config(source.config)
    _write_json(folder / "config.json", config | {"torch_dtype": str(model.dtype).removeprefix("torch.")})
    eos = sorted(eos_token_ids(source.checkpoint) | source.tokenizer.end_ids)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    for name, text in _tokenizer_files(source).items():
        (folder / name).write_text(text, encoding="utf-8")


def architectures(source: ModelSource) -> list[str]:
    """Return the names of the model's classes in transformers."""
    given = source.checkpoint.config.get("architectures")
    return list(given) if isinstance(given, list) else [f"{CLASSES[source.config.family]}ForCausalLM"]


def _llama_config(config: ModelConfig) -> dict[str, Any]:
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


def _tokenizer_files(source: ModelSource) -> dict[str, str]:
    if source.checkpoint.kind == "folder":
        return dict(source.checkpoint.tokenizer_files)
    tokenizer = source.tokenizer
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    if tokenizer.bos_id is not None:
        config["bos_token"] = tokenizer.piece(tokenizer.bos_id)
    if tokenizer.end_ids:
        config["eos_token"] = tokenizer.piece(min(tokenizer.end_ids))
    return {"tokenizer.json": tokenizer.as_json(), "tokenizer_config.json": json.dumps(config, indent=1)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def export_head(head: DraftHead[Any], target: Decoder, source: ModelSource, name: str, form: str, folder: Path) -> None:
    """Write an EAGLE-3 head in the format `form`; `name` is the target's name there."""
    if not isinstance(head, EagleHead) or head.config.generation != 3:
        kind = head.config.kind
        raise RequestError("draft", f"is a {kind} head, which {form} does not support; export an EAGLE-3 head")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(head, TargetWeights.of(target), form)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if form == "speculators":
        config = _speculators_config(head.config, source, name)
    else:
        config = _eagle3_config(head.config, source.config)
    _write_json(folder / "config.json", config)


def _tensors(head: EagleHead, shared: TargetWeights, form: str) -> dict[str, Tensor]:
    """Return the tensors under the format's names; our fused matrices are split."""
    first = "midlayer" if form == "eagle3" else "layers.0"
    state = {name: tensor.detach().cpu().float() for name, tensor in head.own_state_dict().items()}
    found: dict[str, Tensor] = {}
    for ours, theirs in _tensor_names(head.config, first).items():
        chunks = state[ours].chunk(len(theirs))
        found |= {name: chunk.contiguous().clone() for name, chunk in zip(theirs, chunks, strict=True)}
    ids = head.draft_ids.cpu()
    found["d2t"] = ids - torch.arange(len(ids))
    found["t2d"] = torch.zeros(head.config.vocab, dtype=torch.bool)
    found["t2d"][ids] = True
    if "output.weight" in state:
        found["lm_head.weight"] = state["output.weight"]
    else:
        found["lm_head.weight"] = shared.output.cpu()[ids].float()
    if form == "speculators":
        found["embed_tokens.weight"] = state["embed"] if "embed" in state else shared.embed.cpu().float()
    return found


def _tensor_names(config: EagleConfig, first: str) -> dict[str, tuple[str, ...]]:
    """Return the format's tensor names for each of our tensors."""
    parts = layer_tensors(config.layer, 0, first, None)
    for i in range(1, config.layers):
        parts |= layer_tensors(config.layer, i, f"layers.{i}")
    parts |= {
        "fc.weight": ("fc.weight",),
        "embed_norm.weight": (f"{first}.input_layernorm.weight",),
        "feature_norm.weight": (f"{first}.hidden_norm.weight",),
        "norm.weight": ("norm.weight",),
    }
    parts |= {"fc.bias": ("fc.bias",)} if config.fc_bias else {}
    parts |= {"fc_norm.weight": ("input_norm.weight",)} if config.norm_before_fc else {}
    if config.fc_norm:
        parts |= {f"tap_norms.{i}.weight": (f"fc_norm.{i}.weight",) for i in range(len(config.hidden_layers))}
    return parts


def _layer_config(layer: LayerConfig, target: ModelConfig, layers: int) -> dict[str, Any]:
    """Return a transformers Llama config with the shape of a head layer."""
    return {
        "model_type": "llama",
        "vocab_size": target.vocab,
        "hidden_size": layer.width,
        "intermediate_size": layer.ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope.theta,
        "max_position_embeddings": target.context,
        "hidden_act": "silu" if layer.activation == "silu" else "gelu_pytorch_tanh",
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
    }


def _flags(config: EagleConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.outputs,
        "target_hidden_size": config.target_width,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.hidden_layers),
        "torch_dtype": "float32",
    }


def _eagle3_config(config: EagleConfig, target: ModelConfig) -> dict[str, Any]:
    """Return the config of the EAGLE-3 reference, as SpecForge writes it.

    SGLang reads layer ids as indices of layers if the first is 1, else as indices of hidden states, one higher.
    """
    layers = (
        [layer - 1 for layer in config.hidden_layers] if config.hidden_layers[0] == 2 else list(config.hidden_layers)
    )
    nested = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    return {**own, **_layer_config(config.layer, target, config.layers), **_flags(config)}


def _speculators_config(config: EagleConfig, source: ModelSource, name: str) -> dict[str, Any]:
    """Return a config of the speculators format, which vLLM reads."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config.layer, source.config, config.layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": name, "architectures": architectures(source)},
        },
        **_flags(config),
    }
