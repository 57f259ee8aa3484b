"""Chooses the kernel of a linear layer: ours, or the library's (cuBLAS) where it returns the same bits per row."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.quant import QuantFormat, QuantizedRows, unscaled_matmul
from foretell.kernels.triton import quant_linear
from foretell.kernels.triton.linear import CUBLAS_ROWS, FEW_ROWS, MAX_ROWS, gated_linear, linear
from foretell.kernels.triton.norm import ResidualDelta
from foretell.kernels.triton.swiglu import gated_activation
from foretell.models.layers import Linear
from foretell.models.quantize import CudaQuantizedLinear

Shape = tuple[int, int, int]
Rows = Tensor | QuantizedRows  # [rows, in], quantized for a quantized layer


class LinearDispatch:
    """Runs linear layers: batch-invariant for decode rows, as fast as possible for prefill rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trusted: dict[Shape, bool] = {}

    def __call__(self, layer: Linear, x: Rows, prefill: bool) -> Tensor:
        """Multiply [rows, in] to [rows, out]; `prefill`: the bits of a row may depend on the other rows."""
        if isinstance(layer, CudaQuantizedLinear):
            return self._quantized(layer, _quantized(x, layer), prefill)
        assert isinstance(x, Tensor), "quantized rows are for quantized layers"
        if prefill or _outside(layer, x) or (len(x) > CUBLAS_ROWS and self._trusts(layer, x)):
            product: Tensor = layer(x)
            return product
        assert layer.weight is not None, "checked above"
        return linear(x, layer.weight, layer.bias)

    def gated(self, layer: Linear, x: Rows, prefill: bool, gelu: bool, format: QuantFormat | None) -> Rows:
        """Multiply and gate [rows, in] to [rows, out / 2] (SwiGLU or GeGLU); the gate is the first half."""
        if prefill or len(x) > FEW_ROWS:
            return gated_activation(self(layer, x, prefill), gelu, format)
        if isinstance(layer, CudaQuantizedLinear):
            rows = _quantized(x, layer)
            gated = quant_linear.gated_quant_linear(rows, layer.quantized, layer.bias, self.dtype, gelu)
        elif isinstance(x, QuantizedRows) or layer.weight is None or _outside(layer, x):
            return gated_activation(self(layer, x, prefill), gelu, format)
        else:
            gated = gated_linear(x, layer.weight, layer.bias, gelu)
        return gated if format is None else quant_linear.quantize_rows(gated, format)

    def in_parts(self, layer: Linear, x: Rows, prefill: bool) -> ResidualDelta:
        """Multiply [rows, in] to partial sums [parts, rows, out], which the next kernel adds up."""
        if isinstance(layer, CudaQuantizedLinear):
            return self._quantized_splits(layer, _quantized(x, layer), prefill)
        assert isinstance(x, Tensor), "quantized rows are for quantized layers"
        if prefill or _outside(layer, x):
            product: Tensor = layer(x)
            return ResidualDelta(product[None])
        assert layer.weight is not None, "checked above"
        return ResidualDelta(linear(x, layer.weight, layer.bias, split=True))

    def _quantized(self, layer: CudaQuantizedLinear, x: QuantizedRows, prefill: bool) -> Tensor:
        if not prefill and len(x) <= quant_linear.MAX_ROWS:
            return quant_linear.quant_linear(x, layer.quantized, layer.bias, self.dtype)
        if x.format == "int8":
            return quant_linear.apply_scales(
                unscaled_matmul(x, layer.quantized), x, layer.quantized, layer.bias, self.dtype
            )
        return _float8(x, layer, self.dtype)

    def _quantized_splits(self, layer: CudaQuantizedLinear, x: QuantizedRows, prefill: bool) -> ResidualDelta:
        if layer.bias is not None:
            return ResidualDelta(self._quantized(layer, x, prefill)[None])
        if not prefill and len(x) <= quant_linear.MAX_ROWS:
            return ResidualDelta(
                quant_linear.quant_linear_unscaled(x, layer.quantized), x.scales, layer.quantized.scales
            )
        if x.format == "int8":
            return ResidualDelta(unscaled_matmul(x, layer.quantized)[None], x.scales, layer.quantized.scales)
        return ResidualDelta(_float8(x, layer, self.dtype)[None])

    def _trusts(self, layer: Linear, x: Tensor) -> bool:
        """Return whether the library adds up like our kernel for this many rows. Tested once, before any capture."""
        shape = (len(x), layer.inputs, layer.outputs)
        if shape not in self._trusted:
            assert layer.weight is not None, "called for layers with weights only"
            noise = torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
            own = linear(noise[:CUBLAS_ROWS].contiguous(), layer.weight, layer.bias)
            self._trusted[shape] = torch.equal(own, layer(noise)[:CUBLAS_ROWS])
        return self._trusted[shape]


def format_of(layer: Linear) -> QuantFormat | None:
    """Return the format in which a layer takes its rows; None for floats."""
    return layer.quantized.format if isinstance(layer, CudaQuantizedLinear) else None


def _quantized(x: Rows, layer: CudaQuantizedLinear) -> QuantizedRows:
    return x if isinstance(x, QuantizedRows) else quant_linear.quantize_rows(x, layer.quantized.format)


def _float8(x: QuantizedRows, layer: CudaQuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Multiply many fp8 rows with the library, if it supports the shape and the dtype."""
    weights, bias = layer.quantized, layer.bias
    inputs, outputs = layer.inputs, layer.outputs
    if not x.values.is_cuda or inputs % 16 or outputs % 16 or dtype != torch.bfloat16:
        return quant_linear.apply_scales(unscaled_matmul(x, weights), x, weights, bias, dtype)
    product = torch._scaled_mm(
        x.values, weights.values.T, scale_a=x.scales[:, None], scale_b=weights.scales[None], out_dtype=dtype
    )
    return product if bias is None else product + bias


def _outside(layer: Linear, x: Tensor) -> bool:
    """Return whether our kernel does not support these rows."""
    return layer.weight is None or len(x) > MAX_ROWS or x.dtype == torch.float32
