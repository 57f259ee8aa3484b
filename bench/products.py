"""Which product is fast for few rows in float32: python bench/products.py. All linear layers of SmolLM2-135M once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.linear import onednn_linear, pack_onednn

LAYERS = [(576, 960, 30), (576, 576, 30), (576, 3072, 30), (1536, 576, 30), (576, 49152, 1)]  # in, out, how many
ROWS = (1, 2, 4, 8, 16, 64)


def transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, x.t()).t()


def packed_product(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear(x, weight, None)


@torch.inference_mode()
def milliseconds(call: Callable[[Tensor, Tensor], Tensor], weights: list[Tensor], inputs: list[Tensor]) -> float:
    seen = []
    for _ in range(9):
        began = time.perf_counter()
        for x, weight in zip(inputs, weights, strict=True):
            call(x, weight)
        seen.append(time.perf_counter() - began)
    return median(seen) * 1e3


def main() -> None:
    shapes = [(i, o) for i, o, count in LAYERS for _ in range(count)]
    plain = [torch.randn(o, i) for i, o in shapes]
    packed = [pack_onednn(weight) for weight in plain]
    ways: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]] = {
        "F.linear": (F.linear, plain),
        "W @ x.T": (transposed_product, plain),
        "x @ W.T, stored transposed": (torch.mm, [weight.t().contiguous() for weight in plain]),
    }
    if all(weight is not None for weight in packed):
        ways["packed"] = (packed_product, [weight for weight in packed if weight is not None])
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for rows in ROWS:
        inputs = [torch.randn(rows, i) for i, _ in shapes]
        for name, (call, weights) in ways.items():
            found[name][rows] = milliseconds(call, weights, inputs)
    for name, times in found.items():
        print(f"{name:28}", *(f"{times[rows]:8.1f}" for rows in ROWS))
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "ms": found}))


if __name__ == "__main__":
    main()
