"""Quantized layers decode to the weight that their layout stands for, in whole and by rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub import Checkpoint, open_checkpoint
from foretell.hub.quantized import parts as stored
from foretell.hub.quantized.settings import METHODS
from foretell.hub.quantized.table import FORMAT_TABLE
from tests.allocations import Sizes

from .formats import FORMATS
from .packers import gptq, mxfp4

LAYER = "model.layers.0.mlp.up_proj"


def weight(outputs: int = 48, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    save_file({name: values.contiguous().clone() for name, values in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def layer(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{LAYER}.{part}": values for part, values in parts.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_decodes_to_what_its_layout_says(name: str, tmp_path: Path) -> None:
    each, plain = FORMATS[name], torch.randn(5, 4)
    parts, exact = each.pack(weight())
    others = {"lm_head.weight": plain, "mtp.fc.weight": plain + 1, f"{LAYER}.bias": plain[0]}
    others |= {"model.layers.0.self_attn.k_scale": torch.tensor(1.0)}
    checkpoint = write(tmp_path, each.config, layer(parts) | others)
    found = dict(checkpoint.tensors())
    assert found.keys() == {f"{LAYER}.weight", f"{LAYER}.bias", "lm_head.weight", "mtp.fc.weight"}
    assert torch.equal(found["lm_head.weight"].load(), plain), "ignored modules are as stored"
    decoded = found[f"{LAYER}.weight"]
    assert decoded.shape == exact.shape and torch.equal(decoded.load(), exact)
    for start, stop in ((0, 1), (7, 8), (3, 29), (40, 48), (40, 99), (5, 5)):
        assert torch.equal(decoded.rows(start, stop), exact[start:stop])
    assert checkpoint.quantization == each.name
    assert decoded.stored is not None and decoded.stored.fits_int4 == (each.runs_as == "int4")


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_larger_than_a_chunk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "VALUES", 16 * 64)
    parts, exact = FORMATS[name].pack(weight(outputs=56, inputs=64))
    decoded = dict(write(tmp_path, FORMATS[name].config, layer(parts)).tensors())[f"{LAYER}.weight"]
    assert torch.equal(decoded.load(), exact)
    assert torch.equal(decoded.rows(13, 53), exact[13:53])


def test_layers_may_have_other_bits_than_the_config(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` and AutoRound's `extra_config` give layers their own bits."""
    tensors, wanted = {}, {}
    for bits in (2, 4, 8):
        parts, wanted[f"{bits}.weight"] = gptq(weight(), bits=bits, act_order=False)
        tensors |= {f"{bits}.{part}": values for part, values in parts.items()}
    found = dict(write(tmp_path, FORMATS["gptq"].config, tensors).tensors())
    assert all(torch.equal(found[name].load(), exact) for name, exact in wanted.items())


@pytest.mark.parametrize("has_index", [False, True])
def test_layers_may_have_other_groups_than_the_config(has_index: bool, tmp_path: Path) -> None:
    tensors, wanted = {}, {}
    for size in (16, 32, 48, 96):
        parts, wanted[f"{size}.weight"] = gptq(weight(), act_order=False, sym=True, size=size)
        if not has_index:
            del parts["g_idx"]
        tensors |= {f"{size}.{part}": values for part, values in parts.items()}
    found = dict(write(tmp_path, FORMATS["gptq symmetric"].config, tensors).tensors())
    assert all(torch.equal(found[name].load(), exact) for name, exact in wanted.items())
    stored = {name: tensor.stored for name, tensor in found.items()}
    assert {name: each.name for name, each in stored.items() if each} == {
        "16.weight": "int4 group 16",
        "32.weight": "int4 group 32",
        "48.weight": "int4 group 48",
        "96.weight": "int4 per channel",
    }
    assert {name for name, each in stored.items() if each and each.fits_int4} == {"32.weight", "96.weight"}


def test_groups_that_only_an_index_explains(tmp_path: Path) -> None:
    """96 inputs in four groups of 20 and one of 16, in a config with groups of 32."""
    parts, exact = gptq(weight(), act_order=False, sym=False, size=20)
    assert parts["scales"].shape[0] == 5
    config = FORMATS["gptq"].config
    (decoded,) = dict(write(tmp_path / "a", config, layer(parts)).tensors()).values()
    assert torch.equal(decoded.load(), exact)
    assert decoded.stored is not None and decoded.stored.name == "asymmetric int4 5 groups, act order"
    del parts["g_idx"]
    line = refusal(tmp_path / "b", config, layer(parts))
    assert "scales' has 5 groups, which neither are of 32 nor divide 96 inputs" in line


@pytest.mark.parametrize("own", [{"+:.*up": {"sym": False}}, {"up": {"bits": 4, "desc_act": True}}])
@pytest.mark.parametrize("key", ["dynamic", "extra_config"])
def test_settings_of_single_layers_keep_a_file_from_int4(key: str, own: dict[str, Any], tmp_path: Path) -> None:
    each = FORMATS["gptq symmetric"]
    (decoded,) = dict(write(tmp_path, each.config | {key: own}, layer(each.pack(weight())[0])).tensors()).values()
    assert decoded.stored is not None and not decoded.stored.fits_int4


def test_blocks_of_modelopt(tmp_path: Path) -> None:
    """Blocks of 128x128 with scales of four dimensions, in a weight that they do not divide."""
    each, large = FORMATS["modelopt fp8 blocks"], weight(outputs=300, inputs=200)
    parts, exact = each.pack(large)
    assert parts["weight_scale"].shape == (3, 1, 2, 1)
    (decoded,) = dict(write(tmp_path / "a", each.config, layer(parts)).tensors()).values()
    assert torch.equal(decoded.load(), exact) and torch.equal(decoded.rows(100, 290), exact[100:290])
    assert decoded.stored is not None and decoded.stored.name == "FP8 128x128 blocks"
    parts["weight_scale"] = parts["weight_scale"].reshape(3, 2, 1, 1)
    assert "[3, 2] for 128x128 blocks" in refusal(tmp_path / "b", each.config, layer(parts))


def test_a_block_larger_than_its_weight_takes_no_more_memory(tmp_path: Path) -> None:
    """A config may state a million columns: the scales were once repeated for all of them."""
    values = torch.randn(4096, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5], [2.0]])
    config = {"quant_method": "fp8", "weight_block_size": [2048, (1 << 20) - 1]}
    checkpoint = write(tmp_path, config, layer({"weight": values, "weight_scale_inv": scales}))
    (decoded,) = dict(checkpoint.tensors()).values()
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        found = decoded.load()
    assert torch.equal(found, values.float() * scales.repeat_interleave(2048, 0))
    assert max(sizes.bytes) == found.nbytes


def test_experts_in_gpt_oss_layout(tmp_path: Path) -> None:
    parts, exact = mxfp4(weight(outputs=12))
    blocks, scales = parts["weight_packed"].view(3, 4, 3, 16), parts["weight_scale"].view(3, 4, 3)
    tensors = {
        "experts.up_proj_blocks": blocks,
        "experts.up_proj_scales": scales,
        "experts.up_proj_bias": torch.ones(3),
    }
    found = dict(write(tmp_path, {"quant_method": "mxfp4"}, tensors).tensors())
    assert found.keys() == {"experts.up_proj", "experts.up_proj_bias"}
    assert torch.equal(found["experts.up_proj"].load(), exact.view(3, 4, 96))
    assert torch.equal(found["experts.up_proj"].rows(1, 2), exact.view(3, 4, 96)[1:2])


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()
    start = page.index("| `fp8`")
    table = page[start : page.index("\n\n", start)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.replace("`", "").splitlines()]
    assert rows == [list(row) for row in FORMAT_TABLE]
    named = {name for row in FORMAT_TABLE for name in row.methods.replace("_", "-").split(", ")}
    assert named == METHODS.keys()


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_the_config_may_be_in_a_file_of_its_own(file: str, tmp_path: Path) -> None:
    name = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}[file]
    parts, exact = FORMATS[name].pack(weight())
    write(tmp_path, {}, layer(parts))
    stated = {key: value for key, value in FORMATS[name].config.items() if key != "quant_method"}
    nested = {"producer": {"name": "modelopt"}, "quantization": stated} if name == "modelopt" else stated
    (tmp_path / file).write_text(json.dumps(nested))
    assert torch.equal(dict(open_checkpoint(tmp_path).tensors())[f"{LAYER}.weight"].load(), exact)


def refusal(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Return the one line of a checkpoint that is refused before a weight is read."""
    with pytest.raises(ModelError) as caught:
        list(write(folder, config, tensors).tensors())
    assert "\n" not in str(caught.value)
    return str(caught.value)


REQUIRED = [
    (name, part)
    for name, each in FORMATS.items()
    for part in each.pack(weight())[0]
    if part not in ("g_idx", "weight_g_idx", "weight_zero_point", "weight_format", "weight_global_scale")
    and part not in ("weight_scale_2", "weight.nested_absmax")
    and not part.startswith("input")
]


@pytest.mark.parametrize(("name", "part"), REQUIRED)
def test_a_missing_tensor_is_named(name: str, part: str, tmp_path: Path) -> None:
    parts, _ = FORMATS[name].pack(weight())
    del parts[part]
    line = refusal(tmp_path, FORMATS[name].config, layer(parts))
    assert f"'{LAYER}." in line and ("missing" in line or "layout" in line)


@pytest.mark.parametrize(
    ("name", "part"), [case for case in REQUIRED if case[1] != "weight" or "per tensor" not in FORMATS[case[0]].name]
)
def test_a_wrong_shape_is_named(name: str, part: str, tmp_path: Path) -> None:
    parts, _ = FORMATS[name].pack(weight())
    shape = parts[part].shape
    parts[part] = torch.zeros([7, *shape[1:]] if len(shape) else [7], dtype=torch.uint8).to(parts[part].dtype)
    line = refusal(tmp_path, FORMATS[name].config, layer(parts))
    assert f"tensor '{LAYER}." in line


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_type_is_named(name: str, tmp_path: Path) -> None:
    parts, _ = FORMATS[name].pack(weight())
    part = next(part for part in parts if "scale" in part or part in ("SCB", "weight.quant_map"))
    parts[part] = parts[part].to(torch.int16)
    assert f"'{LAYER}.{part}' has type I16" in refusal(tmp_path, FORMATS[name].config, layer(parts))


@pytest.mark.parametrize(
    ("name", "part", "value", "words"),
    [
        ("gptq", "scales", torch.ones(5, 48, dtype=torch.float16), "qzeros"),
        ("awq", "scales", torch.ones(7, 48, dtype=torch.float16), "qzeros"),
        ("ct w4", "weight_scale", torch.ones(48, 7), "has 7 groups, which do not divide 96 inputs"),
        ("ct w4", "weight_shape", torch.tensor([48, 2**40]), "which does not fit weight_packed"),
        ("ct w4", "weight_shape", torch.tensor([48, -96]), "which does not fit weight_packed"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(5, 5), "[2, 3] for 24x40 blocks"),
        ("fp8 channel", "weight_scale", torch.ones(48, 7), "has 7 groups"),
        ("bnb int8", "weight_format", torch.tensor(1, dtype=torch.uint8), "only `row`"),
        ("mxfp4", "weight_packed", torch.zeros(48, 47, dtype=torch.uint8), "groups of 32 do not divide"),
        ("gptq", "weight", torch.zeros(48, 96), "does not belong to a layer in the layout gptq"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "must hold a JSON object"),
    ],
)
def test_parts_that_do_not_fit_together(name: str, part: str, value: torch.Tensor, words: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, FORMATS[name].config, layer(FORMATS[name].pack(weight())[0] | {part: value}))
    assert words in line and f"'{LAYER}." in line


@pytest.mark.parametrize("value", [-1, 3, 99])
@pytest.mark.parametrize(("name", "part"), [("gptq", "g_idx"), ("ct act order", "weight_g_idx")])
def test_a_group_that_does_not_exist_is_an_error(name: str, part: str, value: int, tmp_path: Path) -> None:
    parts, _ = FORMATS[name].pack(weight())
    parts[part][5] = value
    decoded = dict(write(tmp_path, FORMATS[name].config, layer(parts)).tensors())[f"{LAYER}.weight"]
    with pytest.raises(ModelError, match=f"{part}' must name groups from 0 to 2"):
        decoded.load()


def test_shards_of_two_formats(tmp_path: Path) -> None:
    mixed = layer(FORMATS["gptq"].pack(weight())[0]) | {"other.weight": torch.zeros(4, 4, dtype=torch.int8)}
    line = refusal(tmp_path, FORMATS["gptq"].config, mixed)
    assert "'other.weight' belongs to a layer in the layout blocks" in line and "shards of one checkpoint" in line


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "hqq"}, "'hqq'"),
    ({"bits": 4}, "'none'"),
    ({"quant_method": 7}, "quant_method is 7"),
    ({"quant_method": "awq", "bits": 3}, "bits is 3; supported is 4"),
    ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
    ({"quant_method": "gptq", "bits": 3}, "2 or 4 or 8"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "gptq", "group_size": 0}, "group_size is 0"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "such as [128, 128]"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "dense"}, "'dense'"),
    ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "'mxfp8-quantized'"),
    ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "sparse or rotated"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse or rotated"),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, "must be a mapping|a mapping"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "'W4A16_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
    ({"quant_method": "modelopt_fp4", "quant_algo": "MXFP8"}, "'MXFP8'"),
    ({"quant_method": "gptq", "dynamic": [1]}, "dynamic is [1]; supported is a mapping"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, config, layer(FORMATS["gptq"].pack(weight())[0]))
    assert any(word in line for word in words.split("|"))
    with pytest.raises(UnsupportedModelError):
        list(open_checkpoint(tmp_path).tensors())
