"""EAGLE heads in the formats that vLLM and SGLang read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.build.model_source import ModelSource
from foretell.errors import RequestError
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead, EagleConfig, EagleHead, LayerConfig, TargetWeights
from foretell.models.draft_heads.formats.layout import layer_tensors

from .model_files import architectures

SPECULATED = 5  # tokens a step that the file suggests
VERSION = "0.3.0"  # of speculators' format


def export_head(head: DraftHead[Any], target: Decoder, opened: ModelSource, name: str, form: str, folder: Path) -> None:
    """Write a head of ours as others read it; `name` is what they know the target by."""
    if not isinstance(head, EagleHead) or head.config.generation != 3:
        raise RequestError("draft", f"{head.config.kind} heads have no place in {form}'s format; EAGLE-3 heads do")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(head, TargetWeights.of(target), form)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = _speculators(head.config, opened, name) if form == "speculators" else _eagle3(head.config, opened.config)
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _tensors(head: EagleHead, lender: TargetWeights, form: str) -> dict[str, Tensor]:
    """Theirs: matrices that stand one under another with us stand apart there."""
    first = "midlayer" if form == "eagle3" else "layers.0"
    state = {name: tensor.detach().cpu().float() for name, tensor in head.own_state_dict().items()}
    found: dict[str, Tensor] = {}
    for ours, theirs in _parts(head.config, first).items():
        pieces = state[ours].chunk(len(theirs))
        found |= {name: piece.contiguous().clone() for name, piece in zip(theirs, pieces, strict=True)}
    ids = head.draft_ids.cpu()
    found["d2t"] = ids - torch.arange(len(ids))
    found["t2d"] = torch.zeros(head.config.vocab, dtype=torch.bool)
    found["t2d"][ids] = True
    if "output.weight" in state:
        found["lm_head.weight"] = state["output.weight"]
    else:
        found["lm_head.weight"] = lender.output.cpu()[ids].float()
    if form == "speculators":
        found["embed_tokens.weight"] = state["embed"] if "embed" in state else lender.embed.cpu().float()
    return found


def _parts(config: EagleConfig, first: str) -> dict[str, tuple[str, ...]]:
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


def _layer(layer: LayerConfig, target: ModelConfig, layers: int) -> dict[str, Any]:
    """A Llama of that layer, as transformers says it."""
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


def _eagle3(config: EagleConfig, target: ModelConfig) -> dict[str, Any]:
    """EAGLE-3's own, as SpecForge writes it. SGLang counts layers from 0 where the first is 1, and states otherwise."""
    taps = [tap - 1 for tap in config.hidden_layers] if config.hidden_layers[0] == 2 else list(config.hidden_layers)
    nested = {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    return {**own, **_layer(config.layer, target, config.layers), **_flags(config)}


def _speculators(config: EagleConfig, opened: ModelSource, name: str) -> dict[str, Any]:
    """speculators', which vLLM reads."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(config.layer, opened.config, config.layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": name, "architectures": architectures(opened)},
        },
        **_flags(config),
    }
