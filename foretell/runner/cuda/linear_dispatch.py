"""Which kernel multiplies: our own, or the library's where it was seen to give a row the same bits."""

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
Rows = Tensor | QuantizedRows  # [rows, in], in 8 bits for a layer that is


class LinearDispatch:
    """Where text is written a row's bits do not depend on the rows beside it; where it is read it goes fastest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trusted: dict[Shape, bool] = {}

    def __call__(self, layer: Linear, x: Rows, reads: bool) -> Tensor:
        """[rows, in] -> [rows, out]"""
        if isinstance(layer, CudaQuantizedLinear):
            return self._quantized(layer, _in_8_bits(x, layer), reads)
        assert isinstance(x, Tensor), "8 bits are for layers in 8 bits"
        if reads or _outside(layer, x) or (len(x) > CUBLAS_ROWS and self._trusts(layer, x)):
            product: Tensor = layer(x)
            return product
        assert layer.weight is not None, "seen above"
        return linear(x, layer.weight, layer.bias)

    def gated(self, layer: Linear, x: Rows, reads: bool, gelu: bool, format: QuantFormat | None) -> Rows:
        """[rows, in] -> [rows, out / 2]: what the gates, which come first, let through of the rest."""
        if reads or len(x) > FEW_ROWS:
            return gated_activation(self(layer, x, reads), gelu, format)
        if isinstance(layer, CudaQuantizedLinear):
            rows = _in_8_bits(x, layer)
            through = quant_linear.gated_quant_linear(rows, layer.quantized, layer.bias, self.dtype, gelu)
        elif isinstance(x, QuantizedRows) or layer.weight is None or _outside(layer, x):
            return gated_activation(self(layer, x, reads), gelu, format)
        else:
            through = gated_linear(x, layer.weight, layer.bias, gelu)
        return through if format is None else quant_linear.quantize_rows(through, format)

    def in_parts(self, layer: Linear, x: Rows, reads: bool) -> ResidualDelta:
        """[rows, in] -> [parts, rows, out], for a reader that adds them up."""
        if isinstance(layer, CudaQuantizedLinear):
            return self._quantized_splits(layer, _in_8_bits(x, layer), reads)
        assert isinstance(x, Tensor), "8 bits are for layers in 8 bits"
        if reads or _outside(layer, x):
            product: Tensor = layer(x)
            return ResidualDelta(product[None])
        assert layer.weight is not None, "seen above"
        return ResidualDelta(linear(x, layer.weight, layer.bias, split=True))

    def _quantized(self, layer: CudaQuantizedLinear, x: QuantizedRows, reads: bool) -> Tensor:
        if not reads and len(x) <= quant_linear.MAX_ROWS:
            return quant_linear.quant_linear(x, layer.quantized, layer.bias, self.dtype)
        if x.format == "int8":
            return quant_linear.apply_scales(
                unscaled_matmul(x, layer.quantized), x, layer.quantized, layer.bias, self.dtype
            )
        return _float8(x, layer, self.dtype)

    def _quantized_splits(self, layer: CudaQuantizedLinear, x: QuantizedRows, reads: bool) -> ResidualDelta:
        if layer.bias is not None:
            return ResidualDelta(self._quantized(layer, x, reads)[None])
        if not reads and len(x) <= quant_linear.MAX_ROWS:
            return ResidualDelta(
                quant_linear.quant_linear_unscaled(x, layer.quantized), x.scales, layer.quantized.scales
            )
        if x.format == "int8":
            return ResidualDelta(unscaled_matmul(x, layer.quantized)[None], x.scales, layer.quantized.scales)
        return ResidualDelta(_float8(x, layer, self.dtype)[None])

    def _trusts(self, layer: Linear, x: Tensor) -> bool:
        """Whether the library's kernel for this many rows adds up as ours does. Tried once, before any recording."""
        shape = (len(x), layer.inputs, layer.outputs)
        if shape not in self._trusted:
            assert layer.weight is not None, "asked for layers with weights"
            noise = torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
            own = linear(noise[:CUBLAS_ROWS].contiguous(), layer.weight, layer.bias)
            self._trusted[shape] = torch.equal(own, layer(noise)[:CUBLAS_ROWS])
        return self._trusted[shape]


def format_of(layer: Linear) -> QuantFormat | None:
    """In what its rows are to come."""
    return layer.quantized.format if isinstance(layer, CudaQuantizedLinear) else None


def _in_8_bits(x: Rows, layer: CudaQuantizedLinear) -> QuantizedRows:
    return x if isinstance(x, QuantizedRows) else quant_linear.quantize_rows(x, layer.quantized.format)


def _float8(x: QuantizedRows, layer: CudaQuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Many rows: the library's product, where it takes these shapes and gives this type."""
    weights, bias = layer.quantized, layer.bias
    inputs, outputs = layer.inputs, layer.outputs
    if not x.values.is_cuda or inputs % 16 or outputs % 16 or dtype != torch.bfloat16:
        return quant_linear.apply_scales(unscaled_matmul(x, weights), x, weights, bias, dtype)
    product = torch._scaled_mm(
        x.values, weights.values.T, scale_a=x.scales[:, None], scale_b=weights.scales[None], out_dtype=dtype
    )
    return product if bias is None else product + bias


def _outside(layer: Linear, x: Tensor) -> bool:
    """Whether our kernel does not serve these."""
    return layer.weight is None or len(x) > MAX_ROWS or x.dtype == torch.float32
