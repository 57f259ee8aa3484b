"""The text part of models for images and text gives transformers' logits; their vision tensors are skipped by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from foretell.errors import ModelError
from foretell.hub import open_checkpoint
from foretell.models.load import load_model

from . import families
from .running import Reader, gap, greedy, logits

SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14}
SMALL_PATCHES = {"patch_size": 2, "pooling_kernel_size": 1, "model_patch_size": 2}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}


def text_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = families.MODELS[name][1].to_dict()
    return config


def make(name: str) -> families.Model:
    """Return a tiny random model with its vision tower."""
    torch.manual_seed(0)
    if name == "gemma3":
        vision = SIGLIP | {"image_size": 28, "patch_size": 14, "vision_use_head": False}
        text = text_config("gemma3")
        config: Any = Gemma3Config(text_config=text, vision_config=vision, image_token_index=95, mm_tokens_per_image=4)
        return Gemma3ForConditionalGeneration(config)
    if name == "gemma4":
        text = text_config("gemma4") | {"use_bidirectional_attention": "vision"}
        config = Gemma4Config(text_config=text, vision_config=SIGLIP | {"head_dim": 8})
        return Gemma4ForConditionalGeneration(config)
    if name == "gemma4_unified":
        config = Gemma4UnifiedConfig(
            text_config=text_config("gemma4 unified"),
            vision_config={"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32} | SMALL_PATCHES,
            audio_config={"audio_embed_dim": 8},
        )
        return Gemma4UnifiedForConditionalGeneration(config)
    if name == "qwen3_vl":
        text = text_config("qwen3") | {"model_type": "qwen3_vl_text", "tie_word_embeddings": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
        config = Qwen3VLConfig(
            text_config=text, vision_config=QWEN_VISION, image_token_id=95, video_token_id=94, tie_word_embeddings=True
        )
        return Qwen3VLForConditionalGeneration(config)
    text = text_config("ministral3" if name == "mistral3" else "mistral, sliding")
    tied = name == "mistral3"
    config = Mistral3Config(text_config=text, vision_config=PIXTRAL, image_token_index=95, tie_word_embeddings=tied)
    return Mistral3ForConditionalGeneration(config)


def make_random(name: str) -> families.Model:
    """Return a model with weights large enough that logits differ by far more than float error."""
    model = make(name).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if "norm" in key and name != "gemma3" else 0.0
            parameter.normal_(around, 0.3)
    return model


@pytest.fixture(params=["gemma3", "gemma4", "gemma4_unified", "mistral3", "mistral3, untied", "qwen3_vl"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[families.Model, Path]:
    model = make_random(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_text_is_served_without_the_vision_tower(saved: tuple[families.Model, Path]) -> None:
    (model, folder), tokens = saved, families.text(vocab=90)
    expected = families.theirs(model, tokens)
    reader = Reader(load_model(open_checkpoint(folder)))
    assert gap(logits(reader, tokens, 7), expected) < 2e-5
    assert greedy(reader, tokens, 8) == families.their_text(model, tokens, 8)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"speech_tower.proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="speech_tower.proj.weight"):
        load_model(open_checkpoint(folder))
