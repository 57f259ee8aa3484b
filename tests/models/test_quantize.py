"""Quantized copies of a decoder have the expected error, and as draft models change no output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foretell.control.controller import FixedController
from foretell.draft.model import SelfDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.stats import SpeculationStats
from foretell.hub import open_checkpoint, resolve
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.library import library
from foretell.kernels.quant import GROUP_SIZE, QuantFormat
from foretell.kv.prefix import PrefixIndex
from foretell.models import quantize
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.models.quantize import (
    NativeQuantizedLinear,
    quantize_int4,
    quantize_int8,
    quantized_bytes,
    quantized_copy,
)
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer
from tests.tiny import CONFIG, CONTEXT, PROMPTS, add, generate, run, tiny_decoder

FORMATS: list[QuantFormat] = ["int8", "int4"]
BIASED = ModelConfig(
    vocab=50, width=40, layers=2, heads=2, kv_heads=1, head_dim=20, ffn=36, context=64, tied=False, qkv_bias=True
)


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and without."""
    if request.param == "torch":
        monkeypatch.setattr(quantize, "library", lambda: None)
    elif library() is None:
        pytest.skip("no C++ compiler is here")
    return str(request.param)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = numbers(20, 50) * torch.logspace(-3, 3, 20)[:, None]
    weight[3] = 0
    quantized_weight = quantize_int8(weight)
    assert quantized_weight.values.abs().amax(1).tolist() == [0 if i == 3 else 127 for i in range(20)]
    assert ((quantized_weight.dequantized() - weight).abs() <= quantized_weight.scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("inputs", [GROUP_SIZE, 70, 576])
def test_int4_has_less_error_than_absmax_scaling(inputs: int) -> None:
    weight = numbers(300, inputs) * torch.logspace(-3, 3, 300)[:, None]
    weight[7, :GROUP_SIZE] = 0
    quantized_weight = quantize_int4(weight)
    groups = nn.functional.pad(weight, (0, -inputs % GROUP_SIZE)).view(300, -1, GROUP_SIZE)
    simple = groups.abs().amax(-1, keepdim=True) / 7
    naive = ((groups / simple.clamp(min=1e-9)).round() * simple - groups).square().sum((1, 2))
    error = (quantized_weight.dequantized() - weight).square().sum(1)
    assert (error / naive.clamp(min=1e-30)).mean() < 0.75
    assert (
        quantized_weight.values.shape == weight.shape
        and quantized_weight.values.amin() == -8
        and quantized_weight.values.amax() <= 7
    )
    assert (
        quantized_weight.scales.shape == (300, -(-inputs // GROUP_SIZE))
        and quantized_weight.dequantized()[7, :GROUP_SIZE].eq(0).all()
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_computes_what_its_weights_say(format: QuantFormat, way: str) -> None:
    layer = Linear(70, 45, bias=True)
    for parameter in layer.parameters():
        parameter.copy_(numbers(*parameter.shape))
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer.to(dtype)
        small, x = quantize.quantize_linear(layer, format, HugePageArena()), numbers(9, 70).to(dtype)
        assert isinstance(small, NativeQuantizedLinear) == (way == "native")
        off = (small(x).float() - layer(x).float()).norm() / layer(x).float().norm()
        assert small(x).dtype == dtype and 0 < off < (0.02 if format == "int8" else 0.15)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", [CONFIG, BIASED])
def test_the_copy_has_matrices_of_its_own_and_shares_the_rest(
    format: QuantFormat, config: ModelConfig, way: str
) -> None:
    model = tiny_decoder(config=config)
    small = quantized_copy(model, format)
    own = {id(tensor) for tensor in small.parameters()} - {id(tensor) for tensor in model.parameters()}
    layers = [module for module in small.modules() if isinstance(module, Linear)]
    assert len(layers) == 4 * config.layers + 1
    assert own == {id(layer.weight) for layer in layers if layer.weight is not None}
    assert small.embed is model.embed and all(layer.weight is not small.embed for layer in layers)
    model.prepare(16)
    assert small.rope_tables is model.rope_tables and len(small.rope_tables) == 1


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", [CONFIG, BIASED])
def test_the_bytes_are_known_before_anything_is_loaded(format: QuantFormat, config: ModelConfig, way: str) -> None:
    layers = [
        module for module in quantized_copy(tiny_decoder(config=config), format).modules() if isinstance(module, Linear)
    ]
    assert sum(bytes_of(layer) for layer in layers) == quantized_bytes(config, format)


def bytes_of(layer: Linear) -> int:
    if isinstance(layer, NativeQuantizedLinear):
        return layer.product.bytes
    assert layer.packed is not None
    return layer.inputs * layer.outputs * 4


def self_drafting(model: Decoder, format: QuantFormat) -> Engine:
    draft = quantized_copy(model, format)
    runner = ModelRunner(model, 256, 4, CONTEXT)
    drafter = SelfDrafter(runner.with_variant(draft), model.config.vocab, f"self:{format}")
    return Engine(runner, drafter, FixedController(4), Scheduler(runner, PrefixIndex(runner.pool), 16, 64))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantized_draft_leaves_the_text_as_it_is(format: QuantFormat, temperature: float, way: str) -> None:
    engine = self_drafting(tiny_decoder(), format)
    tracks = [
        track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, temperature=temperature)
    ]
    run(engine)
    outputs = [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]
    assert outputs == generate(temperature=temperature)
    record = SpeculationStats.total(track.speculation for track in tracks)
    assert record.accepted_per_step > (3.5 if format == "int8" else 2), "it drafts as the model would"


QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "A train leaves at noon at 60 miles an hour. How far is it by three?",
)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(("format", "least"), [("int8", 4.0), ("int4", 2.7)])
def test_quantized_copies_of_a_real_model_draft_well(format: QuantFormat, least: float) -> None:
    checkpoint = open_checkpoint(resolve("smollm2-135m", lambda line: None))
    tokenizer = Tokenizer.from_gguf(checkpoint.config)
    engine = self_drafting(load_model(checkpoint), format)
    maker = RequestBuilder(RequestLimits(CONTEXT, tokenizer.end_ids, tokenizer.vocab_size), tokenizer, engine.drafter)
    for i, question in enumerate(QUESTIONS):
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)
        for request in maker.make(str(i), prompt, SamplingParams(max_tokens=64, temperature=0)):
            engine.add(request)
    tracks = list(engine.states.values())
    run(engine)
    assert SpeculationStats.total(track.speculation for track in tracks).accepted_per_step >= least
