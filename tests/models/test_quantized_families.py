"""Quantized checkpoints of every family load into the weights they stand for: fused, shared and nested layers, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.hub import open_checkpoint
from foretell.models.hf_config import read_config
from foretell.models.load import fits_int4, load_model
from tests.hub.formats import FORMATS
from tests.models import families, test_multimodal

# Inputs that the groups of 32 of most formats divide.
SIZES = {"intermediate_size": 64}
FORMATS_PER_FAMILY = 3
NAMES = list(FORMATS)
CASES = [
    (family, NAMES[(FORMATS_PER_FAMILY * i + turn) % len(NAMES)])
    for i, family in enumerate(families.ONE_EACH)
    for turn in range(FORMATS_PER_FAMILY)
]


def quantize(folder: Path, name: str, tower: str = "vision_tower", head: bool = False) -> Path:
    """Write a copy in which the linear layers of the text are quantized, and give the original their values."""
    packed = folder.parent / "packed"
    packed.mkdir()
    config = json.loads((folder / "config.json").read_text())
    stored, plain = {}, load_file(folder / "model.safetensors")
    for key, values in list(plain.items()):
        is_layer = ".layers." in key or (head and "lm_head" in key)
        if is_layer and key.endswith("weight") and values.dim() == 2 and tower not in key:
            parts, plain[key] = FORMATS[name].pack(values)
            stored |= {key.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
        else:
            stored[key] = values
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[name].config}))
    save_file(stored, packed / "model.safetensors")
    save_file({key: values.contiguous() for key, values in plain.items()}, folder / "model.safetensors")
    return packed


def check_equal(packed: Path, plain: Path) -> None:
    found, wanted = (dict(load_model(open_checkpoint(each)).named_parameters()) for each in (packed, plain))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_every_format_is_here() -> None:
    assert {format for _, format in CASES} == FORMATS.keys()


@pytest.mark.parametrize(("family", "format"), CASES)
def test_a_family_in_a_format(family: str, format: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"hidden_size_per_layer_input": 32} if family == "gemma4" else {})
    families.make(families.ONE_EACH[family], **sizes).save_pretrained(tmp_path / "plain")
    check_equal(quantize(tmp_path / "plain", format), tmp_path / "plain")


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "qwen3_vl"])
def test_the_quantized_text_of_a_multimodal_model(name: str, tmp_path: Path) -> None:
    test_multimodal.make(name).float().save_pretrained(tmp_path / "plain")
    tower = "visual" if name == "qwen3_vl" else "vision_tower"
    check_equal(quantize(tmp_path / "plain", "fp8 channel", tower), tmp_path / "plain")


@pytest.mark.parametrize("inner", [None, False])
@pytest.mark.parametrize("format", ["ct w4 channel", "gptq one group", "fp8 channel"])
def test_a_quantized_head_of_a_multimodal_model_is_not_tied(format: str, inner: bool | None, tmp_path: Path) -> None:
    """Its tensors have other names than a plain head, and the outer config need not say that it is there."""
    test_multimodal.make("mistral3, untied").float().save_pretrained(tmp_path / "plain")
    packed = quantize(tmp_path / "plain", format, head=True)
    config = json.loads((packed / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = inner
    (packed / "config.json").write_text(json.dumps(config))
    assert not read_config(open_checkpoint(packed)).tied
    check_equal(packed, tmp_path / "plain")


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl"])
@pytest.mark.parametrize("format", ["ct w4 channel", "gptq one group"])
def test_int4_is_chosen_by_the_layers_of_the_text(format: str, name: str, tmp_path: Path) -> None:
    """The layers of the vision tower are not quantized."""
    test_multimodal.make(name).float().save_pretrained(tmp_path / "plain")
    packed = quantize(tmp_path / "plain", format, "visual" if name == "qwen3_vl" else "vision_tower")
    assert fits_int4(open_checkpoint(packed)) and not fits_int4(open_checkpoint(tmp_path / "plain"))
    tensors = load_file(packed / "model.safetensors")
    kept = next(key for key in tensors if "layers.1." in key and "mlp.up_proj." in key and "vision" not in key)
    module = kept.rpartition(".")[0]
    for key in [key for key in tensors if key.startswith(f"{module}.")]:
        del tensors[key]
    tensors[f"{module}.weight"] = load_file(tmp_path / "plain" / "model.safetensors")[f"{module}.weight"]
    save_file(tensors, packed / "model.safetensors")
    assert not fits_int4(open_checkpoint(packed)), "one layer of the text is in floats"


@pytest.mark.parametrize("format", ["gptq", "awq", "nf4", "fp8 blocks"])
def test_the_fused_layers_of_granite_4(format: str, tmp_path: Path) -> None:
    families.make("granite 4", shared_intermediate_size=64).save_pretrained(tmp_path / "plain")
    check_equal(quantize(tmp_path / "plain", format), tmp_path / "plain")
