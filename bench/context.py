"""Step time by context and rows, prefill, and a plain read of the same bytes: python bench/context.py [--quick].

Times are the shortest of the rounds, of steps and reads alike. `--model` and `--quantization` choose other weights,
`--level 1` the kernels for AVX2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import foretell  # isort: skip  # before torch: it tells OpenMP's idle threads to sleep

import torch

from foretell.build.model_source import no_progress, open_model
from foretell.config import KV_CACHE_DTYPES, EngineConfig
from foretell.kernels.native.library import library
from foretell.kernels.quant import QuantFormat
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.models.quantize import quantized_copy
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

CONTEXTS = (128, 1024, 2048, 4096, 7900)  # cached tokens
ROWS = (1, 4, 8, 16)
MOST, PAGE = 8192, 16  # tokens of the longest context and of a page
SHORT = 512  # tokens of the short prefill; the long one has the most cached tokens
READ_BYTES = 512 << 20  # of the plain read


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def runners(name: str, weights: QuantFormat, names: list[str]) -> tuple[dict[str, ModelRunner], int]:
    """The quantized model with a KV cache of each data type, and the bytes of weights that a step reads."""
    opened = open_model(name, EngineConfig(model=name, quantization=weights), no_progress)
    model = quantized_copy(load_model(opened.checkpoint, opened.dtype, opened.device), weights)
    made = {name: ModelRunner(model, MOST // PAGE, PAGE, MOST, kv_dtype=getattr(torch, name)) for name in names}
    layers = [module.native for module in model.modules() if isinstance(module, Linear)]
    return made, sum(layer.bytes for layer in layers if layer is not None)


def prefill(runner: ModelRunner, seq: Sequence, tokens: int) -> float:
    """Prefill in steps of SHORT tokens; return tokens per second."""
    seq.num_computed_tokens = 0
    began = time.perf_counter()
    while seq.num_computed_tokens < tokens:
        share = ScheduledSequence.of(seq, min(SHORT, tokens - seq.num_computed_tokens))
        runner.forward([share], [Draft()])
        seq.num_computed_tokens += share.num_new_tokens
    return tokens / (time.perf_counter() - began)


def step(runner: ModelRunner, seq: Sequence, rows: int) -> None:
    """Run the last token and a chain of draft tokens."""
    runner.forward([ScheduledSequence.of(seq, 1)], [Draft.chain(list(range(5, 4 + rows)))])


def token_bytes(runner: ModelRunner) -> int:
    cache = runner.cache
    return sum(shape.bytes_per_token(cache.dtype, cache.kv_dtype) for shape in cache.shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=("int8", "int4"), default="int8")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="cached tokens, with commas")
    parser.add_argument("--level", type=int, help="instruction set of the kernels: 2 AVX-512 VNNI, 1 AVX2")
    parser.add_argument("--kv", default="float32,bfloat16,float16,int8", help="data types of the KV cache, with commas")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    names, rounds = args.kv.split(","), 3 if args.quick else 12
    assert set(names) <= set(KV_CACHE_DTYPES[1:]), f"--kv: {', '.join(KV_CACHE_DTYPES[1:])}"
    native = library()
    assert native is not None, "a compiler is here"
    native.best_level = native.best_level if args.level is None else min(args.level, native.best_level)
    contexts = [int(each) for each in args.contexts.split(",")]
    longest = max(contexts)
    made, weights = runners(args.model, args.quantization, names)
    found: dict[str, object] = {}
    seqs: dict[str, Sequence] = {}
    for name, runner in made.items():
        request = Request("bench", (), SamplingParams(), 0, 0)
        seqs[name] = seq = Sequence(0, request, [i * 7919 % 40000 + 5 for i in range(longest + 1)])
        assert runner.reserve(seq, MOST)
        prefill(runner, seq, SHORT)
        short, long = prefill(runner, seq, SHORT), prefill(runner, seq, SHORT if args.quick else longest)
        found[f"prefill {name}"] = {"short": short, "long": long}
        print(
            f"{name}: prefill of {SHORT} {short:.0f} tokens/s, of {longest} {long:.0f} ({long / short:.2f})", flush=True
        )
    block = torch.zeros(READ_BYTES // 4)
    print("| context | KV | 1 row, ms | read of the same bytes, ms | over it | 4 rows | 8 rows | 16 rows |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for context in contexts[: 2 if args.quick else None]:
        reads: list[float] = []
        times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in names}
        for _ in range(rounds):
            reads.append(milliseconds(block.sum))
            for name, runner in made.items():
                seqs[name].num_computed_tokens = context
                for rows in ROWS:
                    times[name][rows].append(milliseconds(partial(step, runner, seqs[name], rows)))
        for name, by_rows in times.items():
            ms = {rows: min(each) for rows, each in by_rows.items()}
            read = min(reads) * (weights + context * token_bytes(made[name])) / READ_BYTES
            ratios = [ms[rows] / ms[1] for rows in ROWS[1:]]
            found[f"{context} {name}"] = {"ms": ms, "read_ms": read, "over_read": ms[1] / read}
            shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {context} | {name} | {ms[1]:.2f} | {read:.2f} | {ms[1] / read:.2f} | {shown} |", flush=True)
    about = {"bench": "context", "model": args.model, "quantization": args.quantization, "level": native.best_level}
    print(json.dumps(about | {"version": foretell.__version__, "threads": torch.get_num_threads()} | found))


if __name__ == "__main__":
    main()
