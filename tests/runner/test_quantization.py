"""`quantization`: a target with quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import LLM, SamplingParams
from foretell.build.model_source import choose_quantization
from foretell.config import EngineConfig
from foretell.errors import CapacityError, RequestError
from foretell.hub.checkpoint import Checkpoint
from foretell.hub.tensor import LazyTensor, StoredFormat
from foretell.kernels import linear
from foretell.kernels.native.library import library
from foretell.kernels.quant import QuantFormat
from foretell.models import quantize
from foretell.models.config import ModelConfig
from foretell.models.layers import Linear
from foretell.models.quantize import (
    NativeQuantizedLinear,
    cuda_linear_bytes,
    prepared_bytes,
    quantize_linear_cuda,
    quantize_weights,
    quantized_copy,
)
from foretell.runner.memory_plan import GIB, MemoryNeeds, plan_memory
from foretell.runner.native import executor as native
from foretell.runner.native.executor import NativeExecutor

from .harness import RunnerHarness, random_model, text
from .test_native import CONFIGS, same_bits

FORMATS: list[QuantFormat] = ["int8", "int4"]
PROMPTS = ["The quick brown fox jumps over the lazy dog. The quick brown fox", "She sells sea shells", "The"]
DRAFTERS = ["ngram", "suffix,recycle", "self:int4", "self:int8", "exit:1"]


def written(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM(str(folder), quiet=True, **options)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_do_not_change_the_output(tiny_folder: Path, format: QuantFormat) -> None:
    plain = written(tiny_folder, quantization=format, drafter="none")
    for drafter in DRAFTERS:
        assert written(tiny_folder, quantization=format, drafter=drafter, num_speculative_tokens=4) == plain, drafter


def test_without_native_kernels_it_works_too(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantize, linear, native):
        monkeypatch.setattr(module, "library", lambda: None)
    lines: list[str] = []
    monkeypatch.setattr("foretell.llm.print_progress", lines.append)
    params = SamplingParams(max_tokens=20, temperature=0)
    outputs = [
        LLM(str(tiny_folder), quantization="int8", drafter=drafter).generate(PROMPTS[0], params)[0]
        for drafter in ("none", "ngram")
    ]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert any("quantization: int8, run in floats" in line for line in lines)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_quantized_in_place_equals_its_quantized_copy(config: ModelConfig, format: QuantFormat) -> None:
    tokens = text(40, config.vocab)
    model = quantize_weights(random_model(config), format)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(layers) == 4 * config.layers + 1
    assert same_bits(
        RunnerHarness(model).read(tokens), RunnerHarness(quantized_copy(random_model(config), format)).read(tokens)
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bytes_are_known_before_anything_is_loaded(config: ModelConfig, format: QuantFormat) -> None:
    if library() is None:
        pytest.skip("no C++ compiler is here")
    model = quantize_weights(random_model(config), format)
    layers = [module for module in model.modules() if isinstance(module, NativeQuantizedLinear)]
    integers = sum(layer.native.bytes for layer in layers)
    floats = sum(parameter.nbytes for parameter in model.parameters())
    biases = sum(0 if layer.native.bias is None else layer.native.bias.nbytes for layer in layers)
    assert prepared_bytes(config, torch.float32, "cpu", format) == integers + floats + biases


def test_floats_must_fit_until_they_are_quantized() -> None:
    needs = MemoryNeeds(GIB, 0, 1_000_000, 16, 100, 1, loading=4 * GIB)
    assert plan_memory(needs, 5 * GIB, None).weights == GIB
    with pytest.raises(CapacityError, match="before they are quantized"):
        plan_memory(needs, 3 * GIB, None)


def test_unknown_and_impossible_formats_are_refused() -> None:
    with pytest.raises(RequestError, match="auto, none, int8, int4 or fp8"):
        EngineConfig(quantization="int3")
    with pytest.raises(RequestError, match="int4 runs on a CPU only; take int8 or fp8"):
        choose_quantization(EngineConfig(quantization="int4"), gguf(0), torch.device("cuda"))
    with pytest.raises(RequestError, match="fp8 runs on a CUDA device only"):
        choose_quantization(EngineConfig(quantization="fp8"), gguf(0), torch.device("cpu"))


@pytest.mark.parametrize(
    ("wanted", "device", "format"),
    [
        ("auto", "cuda", None),
        ("none", "cuda", None),
        ("int8", "cuda", "int8"),
        ("fp8", "cuda", "fp8"),
        ("int8", "cpu", "int8"),
    ],
)
def test_a_cuda_device_has_its_own_8_bit_formats(wanted: str, device: str, format: str | None) -> None:
    assert choose_quantization(EngineConfig(quantization=wanted), gguf(0), torch.device(device)) == format


def test_the_8_bit_formats_of_a_cuda_device_are_close_to_floats() -> None:
    """The reference, which runs anywhere: weights scaled per output, rows by their largest value."""
    x = torch.randn(7, 64)
    layer = Linear(64, 48, bias=True)
    assert layer.weight is not None
    assert layer.bias is not None
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    exact = layer(x)
    bounds: dict[QuantFormat, float] = {"int8": 0.02, "fp8": 0.06}
    for rounding, within in bounds.items():
        quantized = quantize_linear_cuda(layer, rounding)
        assert quantized.quantized.nbytes == cuda_linear_bytes(64, 48)
        error = (quantized(x) - exact).norm() / exact.norm()
        assert 0 < error < within, f"{rounding}: {float(error)}"
    alone = quantize_linear_cuda(layer, "int8")
    assert torch.equal(alone(x[2:3]), alone(x)[2:3]), "integer sums are exact, so a row does not depend on the batch"


def gguf(stored: str) -> Checkpoint:
    """Return a GGUF file of which only the type of a layer's matrix is known."""
    kind = None if stored == "F32" else StoredFormat(stored)
    tensor = LazyTensor("blk.0.ffn_up.weight", (32, 32), lambda: torch.zeros(32, 32), stored=kind)
    return Checkpoint(Path("model.gguf"), "gguf", {}, {}, {}, {tensor.name: tensor})


@pytest.mark.skipif(library() is None, reason="no C++ compiler is here")
@pytest.mark.parametrize(
    ("settings", "stored", "device", "format"),
    [
        ({}, "Q4_1", "cpu", "int8"),  # the file's weights are quantized
        ({}, "F32", "cpu", None),
        ({}, "Q4_1", "cuda", None),
        ({"dtype": "float32"}, "Q4_1", "cpu", None),  # an explicit float type wins
        ({"quantization": "none"}, "Q4_1", "cpu", None),
        ({"quantization": "int4"}, "F32", "cpu", "int4"),
    ],
)
def test_weights_are_quantized_if_the_file_has_quantized_weights(
    settings: dict[str, str], stored: str, device: str, format: str | None
) -> None:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    assert choose_quantization(config, gguf(stored), torch.device(device)) == format


@pytest.mark.weights
@pytest.mark.skipif(library() is None, reason="no C++ compiler is here")
def test_no_drafter_changes_the_format_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("foretell.llm.print_progress", lines.append)
    alone, copied = (LLM("smollm2-135m", drafter=name) for name in ("none", "self:int8"))
    assert alone.assembly.memory.weights == copied.assembly.memory.weights
    assert any("is the target itself" in line for line in lines)


@pytest.mark.skipif(library() is None, reason="no C++ compiler is here")
def test_a_quantized_target_runs_natively(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), quantization="int8", quiet=True)
    assert isinstance(llm.engine.runner.executor, NativeExecutor)
    assert llm.assembly.memory.weights < LLM(str(tiny_folder), quiet=True).assembly.memory.weights
