"""Linear layers in float32, 8 and 4 bits, and what else a step takes: python bench/native.py [--quick]."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foretell.build import open_model, say_nothing
from foretell.config import EngineConfig
from foretell.kernels.linear import pack, packed_linear
from foretell.kernels.native.library import library
from foretell.kernels.native.packed import PackedLinear
from foretell.kernels.native.room import Room
from foretell.models import decoder
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.models.quantize import quantize_int4, quantize_int8
from foretell.models.variants import quantized
from foretell.params import SamplingParams
from foretell.runner.runner import ModelRunner
from foretell.types import Draft, Request, Sequence, Share

MODEL = "smollm2-135m"
LAYERS = [(576, 960), (576, 576), (576, 3072), (1536, 576)] * 30 + [(576, 49152)]  # its matrices: in, out
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
CONTEXT = 128  # tokens before the ones a step runs
WATCHED = ("rms_norm", "rotate", "store", "attend")

Products = list[Callable[[Tensor], Tensor]]  # one a layer, in the order of a step


def float_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    packed = pack(weight)
    assert packed is not None, "oneDNN is here"
    return lambda x: packed_linear(x, packed, None)


def arms() -> dict[str, Products]:
    """Every arm has weights of its own for every layer: a step reads all of them once, from memory."""
    native, room = library(), Room()
    assert native is not None, "a compiler is here"
    weights = [torch.randn(outputs, inputs) * 0.02 for inputs, outputs in LAYERS]
    eight = [PackedLinear(native, quantize_int8(weight), room=room) for weight in weights]
    four = [PackedLinear(native, quantize_int4(weight), room=room) for weight in weights[:-1]]
    floats = [float_product(weight) for weight in weights]
    return {"float32": floats, "int8": list(eight), "int4, head int8": [*four, eight[-1]]}


@torch.inference_mode()
def run_products(products: Products, inputs: dict[int, Tensor]) -> None:
    for product, (width, _) in zip(products, LAYERS, strict=True):
        product(inputs[width])


def milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def linears(rounds: int) -> dict[str, dict[int, float]]:
    """All linear layers of a step once: medians, arms interleaved."""
    made = arms()
    found: dict[str, dict[int, float]] = {name: {} for name in made}
    for rows in ROWS:
        inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
        seen: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(rounds):
            for name, products in made.items():
                seen[name].append(milliseconds(partial(run_products, products, inputs)))
        for name, times in seen.items():
            found[name][rows] = median(times)
    return found


class Stopwatch:
    """Stands in for a function and adds up what its calls take."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self.call(*args)
        self.seconds += time.perf_counter() - began
        return result


@contextmanager
def watching(runner: ModelRunner) -> Iterator[dict[str, list[Stopwatch]]]:
    """The decoder's operations and linear layers under stopwatches."""
    plain = {name: getattr(decoder, name) for name in WATCHED}
    watches = {name: [Stopwatch(call)] for name, call in plain.items()}
    layers = [module for module in runner.model.modules() if isinstance(module, Linear)]
    watches["linear"] = [Stopwatch(layer.forward) for layer in layers]
    for name in WATCHED:
        setattr(decoder, name, watches[name][0])
    for layer, watch in zip(layers, watches["linear"], strict=True):
        layer.forward = watch  # type: ignore[assignment, method-assign]
    yield watches
    for name, call in plain.items():
        setattr(decoder, name, call)
    for layer in layers:
        del layer.forward


def parts_of(runner: ModelRunner, seq: Sequence, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of one row by what they go to; medians. `other`: what no stopwatch saw."""
    seen: list[dict[str, float]] = []
    for _ in range(rounds):
        with watching(runner) as watches:
            whole = milliseconds(partial(runner.forward, [Share.of(seq, 1)], [Draft()]))
        parts = {name: sum(watch.seconds for watch in some) * 1e3 for name, some in watches.items()}
        seen.append(parts | {"other": whole - sum(parts.values())})
    return {name: median(parts[name] for parts in seen) for name in seen[0]}


def steps(rounds: int) -> dict[str, dict[str, float]]:
    """Steps of one row of the model and of its quantized copies over the same pages: whole, and by parts."""
    opened = open_model(MODEL, EngineConfig(model=MODEL), say_nothing)
    model = load_model(opened.checkpoint, opened.dtype, opened.device)
    copies = {"int8": quantized(model, 8), "int4, head int8": quantized(model, 4)}
    target = ModelRunner(model, 32, 16, 2 * CONTEXT)
    runners = {"float32": target} | {name: target.lend(copy) for name, copy in copies.items()}
    seq = Sequence(0, Request("bench", (), SamplingParams(), 0, 0), [1] * CONTEXT)
    target.reserve(seq, CONTEXT + 1)
    target.forward([Share.of(seq, CONTEXT)], [Draft()])
    seq.cached = CONTEXT - 1
    wholes: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            wholes[name].append(milliseconds(partial(runner.forward, [Share.of(seq, 1)], [Draft()])))
    parts = {name: parts_of(runner, seq, rounds) for name, runner in runners.items()}
    return {name: {"step": median(wholes[name])} | parts[name] for name in runners}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 5 if parser.parse_args().quick else 25
    products = linears(rounds)
    print("all linear layers, ms".ljust(24), *(f"{rows:8}" for rows in ROWS))
    for name, times in products.items():
        print(name.ljust(24), *(f"{times[rows]:8.2f}" for rows in ROWS))
        print("  over one row".ljust(24), *(f"{times[rows] / times[1]:8.2f}" for rows in ROWS))
    whole = steps(rounds)
    print("a step of one row, ms".ljust(24), *(f"{part:>8}" for part in whole["float32"]))
    for name, parts in whole.items():
        print(name.ljust(24), *(f"{ms:8.2f}" for ms in parts.values()))
    print(
        json.dumps(
            {"threads": torch.get_num_threads(), "torch": torch.__version__, "linears_ms": products, "steps_ms": whole}
        )
    )


if __name__ == "__main__":
    main()
