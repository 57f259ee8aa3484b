"""Linear layers and whole steps in float32, 8 and 4 bits: python bench/native.py [--quick]."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import foretell  # isort: skip  # before torch: it tells OpenMP's idle threads to sleep, or one arm slows the next

import torch
from torch import Tensor

from foretell.build.model_source import no_progress, open_model
from foretell.config import EngineConfig
from foretell.kernels.linear import onednn_linear, pack_onednn
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.packed import PackedLinear
from foretell.models.load import load_model
from foretell.models.quantize import quantize_int4, quantize_int8, quantized_copy
from foretell.runner.executor import EagerExecutor
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

MODEL = "smollm2-135m"
LAYERS = [(576, 960), (576, 576), (576, 3072), (1536, 576)] * 30 + [(576, 49152)]  # its matrices: in, out
ROWS = (1, 2, 4, 8, 16, 64, 512)
CONTEXT, MOST = 128, 1024  # tokens before the ones a step runs, and in all
FEW = 32  # rows; larger steps are measured fewer times

Products = list[Callable[[Tensor], Tensor]]  # one a layer, in the order of a step
Times = dict[str, dict[int, float]]  # medians in milliseconds by arm and rows


def one_dnn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    packed = pack_onednn(weight)
    assert packed is not None, "oneDNN is here"
    return lambda x: onednn_linear(x, packed, None)


def products(native: Library) -> dict[str, Products]:
    """Every arm has weights of its own for every layer: a step reads all of them once, from memory."""
    room = HugePageArena()
    weights = [torch.randn(outputs, inputs) * 0.02 for inputs, outputs in LAYERS]
    eight = [PackedLinear(native, quantize_int8(weight), arena=room) for weight in weights]
    four = [PackedLinear(native, quantize_int4(weight), arena=room) for weight in weights[:-1]]
    return {
        "float32, oneDNN": [one_dnn(weight) for weight in weights],
        "float32": [PackedLinear(native, weight, arena=room) for weight in weights],
        "int8": list(eight),
        "int4, head int8": [*four, eight[-1]],
    }


@torch.inference_mode()
def run_products(made: Products, inputs: dict[int, Tensor]) -> None:
    for product, (width, _) in zip(made, LAYERS, strict=True):
        product(inputs[width])


def milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def medians(calls: dict[str, Callable[[int], Callable[[], Any]]], rounds: int) -> Times:
    """For each arm and number of rows, arms interleaved; the first round warms up and does not count."""
    found: Times = {name: {} for name in calls}
    for rows in ROWS:
        ready = {name: call(rows) for name, call in calls.items()}
        seen: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + (rounds if rows < FEW else max(3, rounds // 8))):
            for name, call in ready.items():
                seen[name].append(milliseconds(call))
        for name, times in seen.items():
            found[name][rows] = median(times[1:])
    return found


def linears(native: Library, rounds: int) -> Times:
    """All linear layers of a step once."""
    inputs = {rows: {width: torch.randn(rows, width) for width in (576, 1536)} for rows in ROWS}

    def call(made: Products, rows: int) -> Callable[[], None]:
        return partial(run_products, made, inputs[rows])

    return medians({name: partial(call, made) for name, made in products(native).items()}, rounds)


def arms() -> dict[str, ModelRunner]:
    """The model and its quantized copies over the same pages, by the native executor; and the eager one."""
    opened = open_model(MODEL, EngineConfig(model=MODEL), no_progress)
    model = load_model(opened.checkpoint, opened.dtype, opened.device)
    copies = {"int8": quantized_copy(model, "int8"), "int4, head int8": quantized_copy(model, "int4")}
    target = ModelRunner(model, MOST // 16, 16, MOST)
    eager = target.with_variant(model)
    eager.executor = EagerExecutor(model, target.cache, target.layout)
    return {"float32, eager": eager, "float32": target} | {
        name: target.with_variant(copy) for name, copy in copies.items()
    }


class Stopwatch:
    """Stands in for the library's step and adds up what it takes."""

    def __init__(self, native: Library) -> None:
        self.step, self.seconds = native.forward, 0.0
        native.forward = self  # type: ignore[assignment, method-assign]

    def __call__(self, *args: Any) -> None:
        began = time.perf_counter()
        self.step(*args)
        self.seconds += time.perf_counter() - began


def text_of(runner: ModelRunner) -> Sequence:
    """A text of CONTEXT tokens, all but the last in the cache."""
    seq = Sequence(0, Request("bench", (), SamplingParams(), 0, 0), [1] * CONTEXT)
    assert runner.reserve(seq, MOST)
    runner.forward([ScheduledSequence.of(seq, CONTEXT)], [Draft()])
    seq.num_computed_tokens = CONTEXT - 1
    return seq


def steps(runners: dict[str, ModelRunner], rounds: int) -> Times:
    """Whole steps: the last token and a chain after it. All rows get logits."""
    seq = text_of(runners["float32"])

    def call(runner: ModelRunner, rows: int) -> Callable[[], Any]:
        return partial(runner.forward, [ScheduledSequence.of(seq, 1)], [Draft.chain(list(range(5, 4 + rows)))])

    return medians({name: partial(call, runner) for name, runner in runners.items()}, rounds)


def outside(native: Library, runner: ModelRunner, rounds: int) -> float:
    """The share of a step of one row that is not spent in the library."""
    seq, watch = text_of(runner), Stopwatch(native)
    whole = sum(milliseconds(partial(runner.forward, [ScheduledSequence.of(seq, 1)], [Draft()])) for _ in range(rounds))
    native.forward = watch.step  # type: ignore[method-assign]
    runner.trim(seq, 0)
    return 1 - watch.seconds * 1e3 / whole


def show(title: str, times: Times) -> None:
    print(title.ljust(24), *(f"{rows:8}" for rows in ROWS))
    for name, row in times.items():
        print(name.ljust(24), *(f"{row[rows]:8.2f}" for rows in ROWS))
        print("  over one row".ljust(24), *(f"{row[rows] / row[1]:8.2f}" for rows in ROWS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 5 if parser.parse_args().quick else 25
    native = library()
    assert native is not None, "a compiler is here"
    runners = arms()
    share = outside(native, runners["int8"], 4 * rounds)
    found = {"steps_ms": steps(runners, rounds), "linears_ms": linears(native, rounds)}
    show(f"a step over {CONTEXT}, ms", found["steps_ms"])
    show("all linear layers, ms", found["linears_ms"])
    print(f"a step of one row in int8 is outside the library for {share:.1%} of its time")
    about = {
        "version": foretell.__version__,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "level": native.best_level,
    }
    print(json.dumps(about | {"level": native.best_level, "outside": share} | found))


if __name__ == "__main__":
    main()
