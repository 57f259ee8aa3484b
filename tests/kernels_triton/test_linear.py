"""A product whose gates are worked out on its way is the product and then the gates."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.kernels.triton.linear import gated_linear, linear
from foretell.kernels.triton.swiglu import gated_activation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies no bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
# Triton's interpreter multiplies with numpy's BLAS, whose rounding depends on a row's position in the tile (OpenBLAS's
# kernels for Haswell and Zen), so there only products are compared that need no rounding.
DATA = ["exact", "random"] if DEVICE.type == "cuda" else ["exact"]


def numbers(shape: tuple[int, ...], data: str, noise: torch.Generator) -> torch.Tensor:
    """Random numbers; "exact": few enough bits that float32 sums of their products are exact in any order."""
    if data == "exact":
        return torch.randint(-4, 5, shape, generator=noise) / 16
    return torch.randn(shape, generator=noise) * shape[-1] ** -0.25


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 24, 5), (3, 200, 40), (17, 136, 1030), (64, 72, 1800)])
def test_gates_on_the_way_change_no_bit(
    rows: int, inputs: int, outputs: int, biased: bool, gelu: bool, dtype: torch.dtype, data: str
) -> None:
    noise = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        numbers(shape, data, noise).to(DEVICE, dtype)
        for shape in ((rows, inputs), (2 * outputs, inputs), (2 * outputs,))
    )
    given = bias if biased else None
    defined = gated_activation(linear(x, weight, given), gelu)
    assert isinstance(defined, torch.Tensor)
    assert torch.equal(gated_linear(x, weight, given, gelu), defined)
    asked = torch.nn.functional.linear(x.float(), weight.float(), None if given is None else given.float())
    activation = torch.nn.functional.gelu if gelu else torch.nn.functional.silu
    truth = activation(asked[:, :outputs]) * asked[:, outputs:]
    torch.testing.assert_close(defined.float(), truth, rtol=3e-2, atol=3e-2 * float(truth.std()) + 1e-3)
