"""Quantized linear layers equal their definition, and a row does not depend on the other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.kernels import quant as definition
from foretell.kernels.quant import QuantFormat
from foretell.kernels.triton import launch_limits, quant_linear
from foretell.kernels.triton.swiglu import gated_activation
from foretell.models.decoder import Decoder
from foretell.models.quantize import quantize_weights_cuda
from foretell.runner.executor import EagerExecutor
from tests.kernels_triton.test_forward import CONFIGS, DEVICE, STEPS, exact_fit, run, step, world

# Where there is no device: the interpreter loses a carry when it rounds to 8-bit floats (31.5 becomes 16).
FORMATS: tuple[QuantFormat, ...] = ("int8", "fp8") if DEVICE.type == "cuda" else ("int8",)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_quantized_as_defined(format: QuantFormat) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 300) * torch.tensor([1e-3, 1, 30, 0, 1e4])[:, None]).to(torch.bfloat16).to(DEVICE)
    mine, defined = quant_linear.quantize_rows(x, format), definition.quantize_rows(x.cpu(), format)
    assert torch.equal(mine.values.float().cpu(), defined.values.float())
    assert torch.equal(mine.scales.cpu(), defined.scales)
    assert not mine.values[3].float().any(), "zeros stay zeros"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 40), (1200, 72)])
def test_a_product_equals_its_definition_in_any_batch(format: QuantFormat, inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    weights = definition.quantize_rows(torch.randn(outputs, inputs), format)
    weights = definition.QuantizedRows(weights.values.to(DEVICE), weights.scales.to(DEVICE))
    x, bias = torch.randn(20, inputs, device=DEVICE), torch.randn(outputs, device=DEVICE)
    rows = quant_linear.quantize_rows(x, format)
    whole = quant_linear.quant_linear(rows, weights, bias, torch.float32)
    there = definition.QuantizedRows(weights.values.cpu(), weights.scales.cpu())
    truth = definition.quantized_linear(x.cpu(), there, bias.cpu())
    torch.testing.assert_close(whole.cpu(), truth, rtol=1e-4, atol=1e-3)
    sums = quant_linear.quant_linear_unscaled(rows, weights)
    for some in (1, 3, 17):
        few = quant_linear.quantize_rows(x[:some].contiguous(), format)
        assert torch.equal(quant_linear.quant_linear(few, weights, bias, torch.float32), whole[:some])
        assert torch.equal(quant_linear.quant_linear_unscaled(few, weights), sums[:, :some])
    if format == "int8":
        totals = definition.unscaled_matmul(rows, weights)
        assert torch.equal(sums.sum(0), totals), "sums of integers are exact"
        assert torch.equal(quant_linear.apply_scales(totals, rows, weights, bias, torch.float32), whole)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 20), (17, 300, 1030)])
def test_gates_on_the_way_change_no_bit(rows: int, inputs: int, outputs: int, gelu: bool, format: QuantFormat) -> None:
    torch.manual_seed(2)
    weights = definition.quantize_rows(torch.randn(2 * outputs, inputs) * inputs**-0.5, format)
    weights = definition.QuantizedRows(weights.values.to(DEVICE), weights.scales.to(DEVICE))
    bias = torch.randn(2 * outputs, device=DEVICE)
    x = quant_linear.quantize_rows(torch.randn(rows, inputs, device=DEVICE), format)
    apart = gated_activation(quant_linear.quant_linear(x, weights, bias, torch.float16), gelu)
    assert isinstance(apart, torch.Tensor)
    together = quant_linear.gated_quant_linear(x, weights, bias, torch.float16, gelu)
    assert torch.equal(together, apart)
    later = quant_linear.quantize_rows(together, format)
    at_once = gated_activation(quant_linear.quant_linear(x, weights, bias, torch.float16), gelu, format)
    assert isinstance(at_once, definition.QuantizedRows)
    assert torch.equal(later.values.float(), at_once.values.float())
    assert torch.equal(later.scales, at_once.scales)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["three to a head", "all norms"])
def test_a_step_in_8_bits_equals_its_definition(name: str, format: QuantFormat) -> None:
    packed, config = step(STEPS["trees"], 4), replace(CONFIGS[name], layers=1)
    outputs = []
    for fast in (True, False):
        model, cache, layout = world(config, 4, torch.float32)
        model = in_8_bits(model, format)
        if fast:
            outputs.append(run(model, cache, packed, exact_fit(packed, layout.queries_per_kv_head), (1,))[0])
        else:
            with torch.inference_mode():
                outputs.append(EagerExecutor(model, cache, layout).forward(packed, (1,)).logits)
    # One quantization step of an activation may fall the other way: near, but not to the last bit.
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert error < (0.02 if format == "int8" else 0.05), float(error)


def in_8_bits(model: Decoder, format: QuantFormat) -> Decoder:
    """The model of a world, which may have packed its weights away on a CPU."""
    from tests.tiny import tiny_decoder

    fresh = quantize_weights_cuda(tiny_decoder(config=model.config).to(DEVICE, model.dtype), format)
    fresh.prepare(model.config.context)
    return fresh


def test_no_more_is_on_its_way_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has it: 227 KiB on one, 99 on another, and nothing that a product could do without."""
    here = torch.device("cpu")
    assert launch_limits.fit_stages(4, 81920, here) == 4
    for bytes_there, stages in ((232448, 2), (101376, 1), (60000, 1), (10**6, 4)):
        monkeypatch.setattr(launch_limits, "max_shared_memory", lambda _, found=bytes_there: found)
        assert launch_limits.fit_stages(4, 81920, here) == stages


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a device's memory is what bounds these")
@pytest.mark.parametrize("rows", [3, 17, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(4032, 12096), (6720, 8064), (12288, 4032)])
def test_large_products_have_room(outputs: int, inputs: int, rows: int) -> None:
    """Those of a large target's head, for as many rows as are read at once; the library's among them."""
    torch.manual_seed(0)
    x, weights = (definition.quantize_rows(torch.randn(n, inputs, device=DEVICE), "int8") for n in (rows, outputs))
    truth = (x.values.double() @ weights.values.double().T).to(torch.int32)
    assert torch.equal(quant_linear.quant_linear_unscaled(x, weights).sum(0), truth)
    assert torch.equal(definition.unscaled_matmul(x, weights), truth)
    product = quant_linear.quant_linear(x, weights, None, torch.float32)
    torch.testing.assert_close(product, truth.float() * x.scales[:, None] * weights.scales)
