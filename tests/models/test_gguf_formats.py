"""How a GGUF file is quantized decides how it runs, and the start says both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from foretell.build.model_source import ModelSource, choose_quantization, describe_quantization
from foretell.config import EngineConfig
from foretell.hub import Checkpoint, open_checkpoint, resolve
from foretell.hub.catalog import BUILTINS
from foretell.kernels.native.library import library
from foretell.models.hf_config import read_config
from foretell.models.load import load_model
from foretell.models.quantize import quantize_int4

from . import families
from .gguf_files import write_gguf

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")


def write(path: Path, layers: Kind | None, ends: Kind | None = None, **others: Kind | None) -> Checkpoint:
    """Write a model whose layers have one type, embedding and output another, and matrices of `others` their own."""

    def kind_of(name: str) -> Kind | None:
        own = [kind for part, kind in others.items() if part in name]
        return own[0] if own else layers if name.startswith("blk.") else ends

    write_gguf(families.make("llama", intermediate_size=64), path / "file.gguf", kind_of=kind_of)
    return open_checkpoint(path / "file.gguf")


def chosen(checkpoint: Checkpoint, **settings: Any) -> str | None:
    return choose_quantization(EngineConfig(model="m", **settings), checkpoint, CPU)


def started(checkpoint: Checkpoint, **settings: Any) -> str:
    """Return the line at the start."""
    config = EngineConfig(model="m", **settings)
    format = choose_quantization(config, checkpoint, CPU)
    tokenizer = cast(Any, None)
    return describe_quantization(
        config, ModelSource(checkpoint, read_config(checkpoint), tokenizer, torch.float32, CPU, format)
    )


@needs_native
@pytest.mark.parametrize(
    ("types", "runs"),
    [
        ({"layers": Kind.Q4_0}, "int4"),
        ({"layers": Kind.Q4_0, "ends": Kind.Q8_0}, "int4"),  # as llama.cpp quantizes the output
        ({"layers": Kind.Q4_0, "ends": Kind.F16}, "int4"),
        ({"layers": Kind.Q4_0, "ffn_down": Kind.Q4_1}, "int8"),
        ({"layers": Kind.Q4_0, "attn_q": None}, "int8"),
        ({"layers": Kind.Q4_1, "ends": Kind.Q8_0}, "int8"),
        ({"layers": Kind.Q8_0}, "int8"),
        ({"layers": None}, None),
        ({"layers": Kind.F16}, None),
        ({"layers": None, "ends": Kind.Q8_0}, None),
    ],
)
def test_layers_decide_the_format(types: dict[str, Any], runs: str | None, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, **types)
    assert chosen(checkpoint) == runs
    assert chosen(checkpoint, quantization="none") is None


def test_int4_keeps_the_values_of_q4_0(tmp_path: Path) -> None:
    """Rows of queries and keys are in another order in the file; groups are within rows."""
    decoder = load_model(write(tmp_path, Kind.Q4_0))
    for block in decoder.blocks:
        for linear in (block.attention.qkv, block.attention.out, block.ffn.gate_up, block.ffn.down):  # type: ignore[union-attr]
            weight = cast(torch.Tensor, linear.weight)
            error = (quantize_int4(weight).dequantized() - weight).norm() / weight.norm()
            assert error.item() < 2**-8


@needs_native
def test_the_start_names_the_types_of_the_file(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, Kind.Q4_1, Kind.Q8_0)
    assert started(checkpoint) == "m: quantization: GGUF Q4_1 and Q8_0 -> int8; --quantization none is exact"
    assert started(checkpoint, quantization="int4") == "m: quantization: GGUF Q4_1 and Q8_0 -> int4"
    exact = "m: quantization: GGUF Q4_1 and Q8_0 -> float32, decoded at load: no kernel runs it as stored"
    assert started(checkpoint, quantization="none") == exact
    many = write(tmp_path, Kind.Q4_0, Kind.Q8_0, ffn_down=Kind.Q4_1)
    assert started(many).startswith("m: quantization: GGUF Q4_0, Q4_1 and Q8_0 -> int8")
    assert started(write(tmp_path, None)) == ""
    assert started(write(tmp_path, None), quantization="int8") == "m: quantization: int8"


def test_a_tensor_knows_how_it_is_stored(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, Kind.Q4_0, Kind.F16)
    tensors = dict(checkpoint.tensors())
    up, embed = tensors["blk.0.ffn_up.weight"], tensors["token_embd.weight"]
    assert up.stored is not None and (up.stored.name, up.stored.fits_int4, up.dtype) == ("Q4_0", True, "")
    assert embed.stored is None and embed.dtype == "F16"


@pytest.mark.weights
@needs_native
@pytest.mark.parametrize("name", BUILTINS)
def test_built_in_models_run_in_int8(name: str) -> None:
    """Their files have 4 bits, but not those of our int4; README's figures and the shipped heads are for int8."""
    assert chosen(open_checkpoint(resolve(name))) == "int8"
