"""Detects unsupported model types by their config, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from foretell.errors import UnsupportedModelError
from foretell.hub.quantized import read_quantization
from foretell.options import nearest

from .config_fields import ConfigFields
from .families import MULTIMODAL

SUPPORTED = "`foretell models --supported` lists the families that are, as safetensors or GGUF"

ADAPTER = "adapter"
MLX = "MLX-quantized"
ENCODER = "encoder or encoder-decoder"
VISION = "vision or audio"
RECURRENT = "recurrent or hybrid"
EXPERTS = "mixture-of-experts"
SOFTCAP = "softcapping"  # outside Gemma
KINDS = {  # by model type in configs and GGUF files, without dashes and underscores
    ENCODER: r"^(m|um|flan)?t5|bart|pegasus|marian|m2m100|bert|electra|encoder|embedding",
    RECURRENT: r"[mjzb]amba|rwkv|qwen3next|qwen35|falconh1|lfm2|hybrid|nemotronh|recurrent|xlstm|plamo2|retnet",
    VISION: r"vl|vision|llava|mllama|pali|clip|idefics|pixtral|mistral3|whisper|audio|speech|omni|gemma3n|gemma4",
    EXPERTS: r"moe|mixtral|deepseek|gptoss|dbrx|grok|arctic|minimax|llama4|kimi",
}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "expert_count")
SENSES = ("vision_config", "audio_config", "speech_config", "vision_tower", "mm_vision_tower")
SOFTCAPPED = ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gemma4")
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Models whose layers of linear attention are Gated DeltaNet, by the same plain name as KINDS.
GATED_DELTA_NET = r"qwen3next|qwen35|olmohybrid"
RECURRENT_LAYERS = ("linear_attention", "conv", "short_conv", "mamba", "mamba2", "recurrent")


def check_supported(config: ConfigFields, name: str, known: Collection[str]) -> None:
    """Raise UnsupportedModelError with the reason unless the model type `name` is one of `known` and supported."""
    if name in ASSISTANTS:
        raise UnsupportedModelError(f"{name!r} drafts for Gemma 4; serve its target with --drafter assistant:FOLDER")
    kind = _kind_by_fields(config, name, known) or _kind_by_name(name, known)
    if kind:
        called, layers = repr(name) if name else "this", _layers_in_words(config, name) if kind == RECURRENT else ""
        raise UnsupportedModelError(
            f"{called} is a model of the {kind} kind{layers}, which is not supported; {SUPPORTED}"
        )
    read_quantization(config.values)  # raises if the method is not supported
    if not name:
        raise config.missing("model_type")
    if name not in known:
        raise UnsupportedModelError(f"model type {name!r} is not supported; {nearest(name, known)}")
    # Gemma 4 has bidirectional attention among the tokens of an image only, which it calls "vision".
    if (
        config.get("use_bidirectional_attention") not in (None, False, "vision")
        or config.get("attention.causal") is False
    ):
        raise UnsupportedModelError(
            f"this {name!r} has bidirectional attention (an embedding model), which is not supported; {SUPPORTED}"
        )


def _kind_by_fields(config: ConfigFields, name: str, known: Collection[str]) -> str | None:
    """Return the kind that the fields show. What the text model is comes before that it sees: only text is served."""
    conditional = any(name.endswith("ForConditionalGeneration") for name in config.strings("architectures"))
    configs = _with_text(config)
    experts = (each.get(count, 0) for each in configs for count in (*EXPERT_COUNTS, "enable_moe_block"))
    signs = {
        ADAPTER: config.get("peft_type") is not None,
        MLX: bool(config.get("quantization")),
        ENCODER: config.get("is_encoder_decoder") is True,
        RECURRENT: bool(_recurrent_layers(config, name)) or _kind_by_name(name, known) == RECURRENT,
        EXPERTS: any(experts),
        VISION: name not in MULTIMODAL and (conditional or any(config.get(sense) for sense in SENSES)),
        SOFTCAP: name not in SOFTCAPPED and any(config.get(softcap) for softcap in SOFTCAPS),
    }
    return next((kind for kind, shown in signs.items() if shown), None)


def _with_text(config: ConfigFields) -> list[ConfigFields]:
    """Return the config, and that of the text part of a multimodal model."""
    text = config.get("text_config")
    return [config, ConfigFields(text)] if isinstance(text, Mapping) else [config]


def _recurrent_layers(config: ConfigFields, name: str) -> set[str]:
    """Return the kinds of recurrent layers that a config states or implies."""
    stated = {layer for each in _with_text(config) for layer in each.strings("layer_types")}
    return stated & set(RECURRENT_LAYERS) if stated or name != "granitemoehybrid" else {"mamba"}


def _layers_in_words(config: ConfigFields, name: str) -> str:
    """Return what the recurrent layers are, if that is known."""
    if re.search(GATED_DELTA_NET, _squeezed(name)):
        return ", with layers of linear attention (Gated DeltaNet)"
    return ", with layers of linear attention" if "linear_attention" in _recurrent_layers(config, name) else ""


def _kind_by_name(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return None
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, _squeezed(name))), None)


def _squeezed(name: str) -> str:
    """Return a model type without what configs and GGUF files write differently."""
    return re.sub(r"[-_]", "", name.lower())
