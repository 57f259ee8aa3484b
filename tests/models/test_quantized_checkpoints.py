"""Quantized checkpoints load into the weights they stand for, in every shard, and speculation changes no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import LLM, SamplingParams
from foretell.build.model_source import describe_quantization, no_progress, open_model
from foretell.config import EngineConfig
from foretell.errors import ModelError
from foretell.hub import open_checkpoint
from foretell.hub.quantized import parts
from foretell.kernels.native.library import library
from foretell.models import packed_weights_cache as cache
from foretell.models.draft_heads import TargetWeights
from foretell.models.draft_heads.loading import open_head, open_mtp
from foretell.models.load import fits_int4, load_model
from foretell.models.packed_weights_cache import PackedWeightsCache
from foretell.models.quantize import quantize_int4
from foretell.models.sharding import Shard
from tests.allocations import Sizes
from tests.folder import Shape
from tests.hub.formats import FORMATS
from tests.hub.packers import symmetric
from tests.quantized_folder import write_quantized_folder
from tests.tensor_parallel.test_loading import put_together

VOCAB_BYTES = 320 * 64 * 4  # of the embedding and of the output layer
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_loads_into_the_weights_it_stands_for(name: str, tmp_path: Path) -> None:
    packed, plain = (load_model(open_checkpoint(each)) for each in write_quantized_folder(tmp_path, name))
    for (key, ours), (_, theirs) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("name", FORMATS)
def test_the_shards_are_the_whole(name: str, tmp_path: Path) -> None:
    packed, plain = (open_checkpoint(each) for each in write_quantized_folder(tmp_path, name))
    with torch.inference_mode():
        whole = put_together([load_model(plain, shard=shard) for shard in Shard(0, 2).all_ranks], False)
        found = put_together([load_model(packed, shard=shard) for shard in Shard(0, 2).all_ranks], False)
    assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", FORMATS)
def test_speculation_changes_no_output(name: str, tmp_path: Path) -> None:
    folder, _ = write_quantized_folder(tmp_path, name)
    settings: dict[str, Any] = {"quiet": True, "keep_packed": False, "num_speculative_tokens": 3}
    texts = []
    for drafter in ("none", "self:int4"):
        llm = LLM(str(folder), drafter=drafter, **settings)
        params = [SamplingParams(max_tokens=12, seed=3, temperature=heat, ignore_eos=True) for heat in (0.0, 1.0)]
        outputs = [output for each in params for output in llm.generate([PROMPT, "She sells"], each)]
        texts.append([output.outputs[0].token_ids for output in outputs])
        assert drafter == "none" or sum(output.speculation.accepted for output in outputs) > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", FORMATS)
def test_the_start_states_what_is_stored_and_what_runs(name: str, tmp_path: Path) -> None:
    folder, _ = write_quantized_folder(tmp_path, name)
    if library() is None:
        pytest.skip("no C++ compiler is here")
    for wanted, runs in (("auto", FORMATS[name].runs_as), ("int4", "int4"), ("none", "float32")):
        config = EngineConfig(model=str(folder), quantization=wanted)
        source = open_model(str(folder), config, no_progress)
        line = describe_quantization(config, source)
        assert line.startswith(f"{folder}: quantization: {FORMATS[name].name} -> {runs}") and "\n" not in line


def test_draft_models_may_be_quantized_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, plain = write_quantized_folder(tmp_path, "nf4")
    settings: dict[str, Any] = {
        "keep_packed": False,
        "num_speculative_tokens": 3,
        "quantization": "none",
    }
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (drafted,) = LLM(str(plain), drafter=f"model:{folder}", **settings).generate(PROMPT, params)
    (alone,) = LLM(str(plain), drafter="none", **settings).generate(PROMPT, params)
    assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids
    assert f"{folder}: quantization: bitsandbytes NF4 -> float32" in capsys.readouterr().err
    assert drafted.speculation.accepted == drafted.speculation.drafted > 0, "it is the same model"


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
def test_an_mtp_module_of_a_quantized_checkpoint(name: str, tmp_path: Path) -> None:
    """It loads with the target, and from a folder of its own."""
    packed, plain = (open_checkpoint(each) for each in write_quantized_folder(tmp_path, name, mtp=True))
    target = load_model(packed)
    wanted = open_mtp(plain, target.config).load(TargetWeights.of(target), torch.float32, 64)
    for source in (open_mtp(packed, target.config), open_head(packed.path, target.config)):
        found = source.load(TargetWeights.of(target), torch.float32, 64)
        states = zip(found.own_state_dict().items(), wanted.own_state_dict().items(), strict=True)
        assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in states)


@pytest.mark.parametrize("deepseek", [False, True])
def test_an_mtp_module_in_floats_does_not_decide_the_format(deepseek: bool, tmp_path: Path) -> None:
    """Qwen names the module `mtp`, with layers of its own; DeepSeek stores it after the last layer."""
    folder, plain = write_quantized_folder(tmp_path, "gptq symmetric", mtp=True)
    module = {key: values for key, values in load_file(plain / "model.safetensors").items() if "mtp" in key}
    tensors = {key: values for key, values in load_file(folder / "model.safetensors").items() if "mtp" not in key}
    if deepseek:
        module = {key.replace("mtp.layers.0", "model.layers.2"): values for key, values in module.items()}
        module["model.layers.2.eh_proj.weight"] = module.pop("mtp.fc.weight")
        module = {key: values for key, values in module.items() if "layers.2" in key}
    save_file(tensors | module, folder / "model.safetensors")
    assert fits_int4(open_checkpoint(folder))


@pytest.mark.parametrize("layout", ["GPTQ", "GGUF Q4_0"])
def test_a_matrix_that_is_int4_keeps_its_values(layout: str) -> None:
    weight = torch.randn(304, 256)
    if layout == "GPTQ":  # its groups are larger than ours
        values, scales = symmetric(weight.numpy(), 128, 4)
        weight = torch.from_numpy(values * np.repeat(scales, 128, 1)).float()
    else:
        packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
        weight = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0))
    assert ((quantize_int4(weight).dequantized() - weight).norm() / weight.norm()).item() < 2**-8


def test_a_matrix_with_zero_points_does_not() -> None:
    weight = FORMATS["awq"].pack(torch.randn(304, 256))[1]
    assert ((quantize_int4(weight).dequantized() - weight).norm() / weight.norm()).item() > 0.02


def test_the_cache_of_packed_weights_knows_the_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_files", lambda path: [])
    headers = []
    for name in ("awq", "gptq"):
        folder, _ = write_quantized_folder(tmp_path / name, name)
        source = open_model(str(folder), EngineConfig(), no_progress)
        headers.append(PackedWeightsCache(source.checkpoint, source.config, "int8").about() | {"checkpoint": ""})
    assert headers[0] != headers[1]


@pytest.mark.parametrize("name", FORMATS)
def test_loading_holds_one_decoded_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the parameters there is one float32 weight at a time, and parts of a few rows."""
    monkeypatch.setattr(parts, "VALUES", 2048)
    folder, _ = write_quantized_folder(tmp_path, name, Shape(width=64, layers=1, ffn=256))
    checkpoint, matrix = open_checkpoint(folder), 256 * 64 * 4
    list(checkpoint.tensors())
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        load_model(checkpoint)
    large = [size for size in sizes.bytes if size > matrix // 2 and size % matrix == 0]
    assert sorted(large) == [matrix] * 4 + [2 * matrix], "up, gate, down, and the parameters"
    assert max(size for size in sizes.bytes if size % matrix) <= VOCAB_BYTES


def test_a_shape_that_is_not_the_models(tmp_path: Path) -> None:
    folder, _ = write_quantized_folder(tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    parts, _ = FORMATS["awq"].pack(torch.randn(96, 32))
    tensors |= {f"model.layers.1.mlp.up_proj.{part}": values.contiguous() for part, values in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj.weight' has shape \[96, 32\], but the config requires \[96, 64\]"):
        load_model(open_checkpoint(folder))


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    folder, _ = write_quantized_folder(tmp_path, "fp8 blocks")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"][1, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="up_proj.weight' has values that are not finite"):
        load_model(open_checkpoint(folder))


def test_a_layer_stored_in_two_ways(tmp_path: Path) -> None:
    """One shard of the quantized model, one of the float model."""
    folder, plain = write_quantized_folder(tmp_path, "gptq")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: load_file(plain / "model.safetensors")[name]}, folder / "second.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    with pytest.raises(ModelError, match=f"{name}' does not belong to a layer in the layout gptq"):
        load_model(open_checkpoint(folder))


def test_a_config_that_is_not_quantized_with_weights_that_are(tmp_path: Path) -> None:
    folder, _ = write_quantized_folder(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\.(qweight|qzeros|scales|g_idx)' does not belong"):
        load_model(open_checkpoint(folder))
