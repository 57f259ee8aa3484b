"""The library's products equal their definitions bit for bit, and a row's bits are its own."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from foretell.kernels.native.huge_pages import CHUNK, HugePageArena
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.packed import PackedLinear, packed_bytes
from foretell.kernels.quant import GROUP_SIZE, Int4Weights, Int8Weights, int4_linear, int8_linear, quantize_groups

SHAPES = [(1, 1), (31, 33), (64, 32), (100, 70), (37, 129), (576, 48)]  # in, out: whole blocks and groups, and not
Weights = Int8Weights | Int4Weights


@pytest.fixture(scope="module")
def native() -> Library:
    found = library()
    if found is None:
        pytest.skip("no C++ compiler is here")
    return found


def random_weights(bits: int, inputs: int, outputs: int, seed: int = 0) -> Weights:
    """Every value a weight can have, the extremes among them, and scales of either sign."""
    rng = torch.Generator().manual_seed(seed)
    if bits == 8:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=rng)
        return Int8Weights(values, torch.rand(outputs, generator=rng) * 0.01)
    values = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=rng)
    return Int4Weights(values, torch.randn(outputs, -(-inputs // GROUP_SIZE), generator=rng).to(torch.bfloat16))


def random_rows(rows: int, inputs: int) -> Tensor:
    """Rows of very different sizes."""
    rng = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=rng) * torch.logspace(-6, 6, max(rows, 1))[:rows, None]


def defined(x: Tensor, weights: Weights, bias: Tensor | None = None) -> Tensor:
    return int8_linear(x, weights, bias) if isinstance(weights, Int8Weights) else int4_linear(x, weights, bias)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_groups_of_a_row_are_quantized_to_the_nearest_step_of_their_scale() -> None:
    x = torch.zeros(2, GROUP_SIZE + 3)
    x[0, :3], x[1, GROUP_SIZE:] = torch.tensor([1.0, -0.5, 127.0]), torch.tensor([-2.54, 0.01, 0.03])
    values, scales = quantize_groups(x)
    assert values[0, 0, :3].tolist() == [1, 0, 127] and values[1, 1, :3].tolist() == [-127, 0, 2]  # ties to even
    assert values[0, 1].eq(0).all() and values[1, 0].eq(0).all()
    assert torch.allclose(scales, torch.tensor([[1.0, 0.0], [0.0, 0.02]]))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_definition_is_the_product_of_what_the_integers_stand_for(bits: int) -> None:
    x, weights = random_rows(5, 100), random_weights(bits, 100, 70)
    values, scales = quantize_groups(x)
    rows = (values.double() * scales.double()[:, :, None]).flatten(1)[:, :100]
    exact = rows @ weights.dequantized().double().t()
    assert ((defined(x, weights) - exact).norm(dim=1) < 1e-6 * exact.norm(dim=1)).all()
    assert ((rows - x).norm(dim=1) < 0.01 * x.norm(dim=1)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_library_equals_the_definition(native: Library, bits: int, level: int) -> None:
    if level > native.best_level:
        pytest.skip("this processor has no such instructions")
    for inputs, outputs in SHAPES:
        weights, bias = random_weights(bits, inputs, outputs), torch.randn(outputs)
        with_bias, without = (
            PackedLinear(native, weights, bias, level=level),
            PackedLinear(native, weights, level=level),
        )
        for rows in [*range(19), 31, 32, 33, 64, 70, 300]:
            x = random_rows(rows, inputs)
            assert same_bits(without(x), defined(x, weights)), (inputs, outputs, rows)
            assert same_bits(with_bias(x), defined(x, weights, bias)), (inputs, outputs, rows)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_sums_do_not_overflow(native: Library, bits: int) -> None:
    x = torch.ones(3, 2048) * torch.tensor([[1.0], [-1.0], [1.0]])
    weights = random_weights(bits, 2048, 40)
    weights.values[:20], weights.values[20:] = (127, -127) if bits == 8 else (7, -8)
    for level in range(native.best_level + 1):
        assert same_bits(PackedLinear(native, weights, level=level)(x), defined(x, weights))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_alone_has_the_bits_it_has_among_others(native: Library, bits: int) -> None:
    weights, x = random_weights(bits, 576, 96), random_rows(64, 576)
    packed = PackedLinear(native, weights)
    together, by_definition = packed(x), defined(x, weights)
    assert all(same_bits(packed(x[i : i + 1])[0], together[i]) for i in range(64))
    assert all(same_bits(defined(x[i : i + 1], weights)[0], by_definition[i]) for i in range(64))


@pytest.mark.parametrize("bits", [8, 4])
def test_threads_change_nothing(native: Library, bits: int) -> None:
    x, weights = random_rows(300, 576), random_weights(bits, 576, 960)
    alone = PackedLinear(native, weights)(x)
    torch.set_num_threads(4)
    try:
        assert all(same_bits(PackedLinear(native, weights)(x[:rows]), alone[:rows]) for rows in (1, 7, 300) * 20)
    finally:
        torch.set_num_threads(1)


def test_callers_in_several_threads_do_not_disturb_each_other(native: Library) -> None:
    x, packed = random_rows(40, 576), PackedLinear(native, random_weights(8, 576, 960))
    expected = packed(x)
    found: list[bool] = []

    def call() -> None:
        found.extend(same_bits(packed(x), expected) for _ in range(30))

    torch.set_num_threads(2)
    try:
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(1)
    assert found == [True] * 90


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_and_of_no_numbers_concern_themselves_alone(native: Library, bits: int) -> None:
    weights = random_weights(bits, 100, 70)
    x = random_rows(7, 100)
    plain = defined(x, weights)
    x[1], x[2] = 0.0, 1e-38  # and a single group that is no number makes the row none
    x[3, 5], x[4, 99], x[5, 0] = math.inf, -math.inf, math.nan
    for level in range(native.best_level + 1):
        product = PackedLinear(native, weights, level=level)(x)
        assert torch.equal(product.nan_to_num(7.0), defined(x, weights).nan_to_num(7.0))
        assert product[1:3].eq(0).all() and product[3:6].isnan().all()
        assert torch.equal(product[[0, 6]], plain[[0, 6]])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bytes_are_those_that_were_promised(native: Library, bits: int) -> None:
    for inputs, outputs in SHAPES:
        packed = PackedLinear(native, random_weights(bits, inputs, outputs))
        assert packed_bytes(outputs, inputs, bits) == packed.bytes


def test_weights_in_large_pages_are_the_same_weights(native: Library) -> None:
    room, x = HugePageArena(), random_rows(3, 576)
    weights = [
        random_weights(bits, 576, outputs) for bits, outputs in ((8, 96), (4, 33), (8, CHUNK // 576 + 1), (4, 64))
    ]
    packed = [PackedLinear(native, matrix, arena=room) for matrix in weights]
    assert all(same_bits(one(x), PackedLinear(native, matrix)(x)) for one, matrix in zip(packed, weights, strict=True))
    assert all(one.weights.values.data_ptr() % 64 == 0 for one in packed)
