"""Time until a model of 5.9 billion weights on local disk is ready on a CUDA device, and its first request against the
tenth: with a cold and with a warm kernel cache.

Run it as `python bench/gpu_start.py [--folder DIR] [--base smollm2-135m] [--drafter auto]`. A folder that is not there
is written first, 12 GB in bf16 (`inflate.py`), and stays; what that takes is said apart. After that the files lie in
the page cache, unless `--from-disk` has them dropped.

The tenth request has the first one's prompt, those between have others, and each has a tenant of its own: nothing that
was read or written before is found again, in the cache or by drafters that copy. What is left of a difference is what
was compiled, recorded and learnt about costs and about how well drafters do; as that decides the draft length,
steps are reported with the seconds, and with `--drafter none` all requests take as many.
`--device cpu --times 1 --layers 2` tries the script elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from inflate import inflate, load_base, write_folder

REQUESTS, PROMPT, WRITTEN = 10, 256, 64
GOALS = {"cold": 40.0, "warm": 20.0}  # seconds until ready
MOST_OVER = 2.0  # the first request over the tenth


def forget_files(folder: Path) -> None:
    """Let the system drop what it holds of them."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(folder: Path, drafter: str, device: str) -> Iterator[dict[str, Any]]:
    """In a process of its own: the times at which it had got how far, and what its requests took."""
    yield {"torch": monotonic()}
    from foretell import LLM, SamplingParams
    from foretell.build import model_source as opened

    seconds: dict[str, float] = {}
    load = opened.load_model

    def timed(*given: Any) -> Any:
        began = perf_counter()
        model = load(*given)
        seconds["reading"] = perf_counter() - began
        return model

    opened.load_model = timed
    yield {"foretell": monotonic()}
    llm = LLM(folder, drafter=drafter, device=device, dtype="bfloat16", quiet=True)
    if device == "cuda":
        torch.cuda.synchronize()
    yield {"ready": monotonic()} | seconds
    took, steps = [], []
    params = SamplingParams(max_tokens=WRITTEN, temperature=0.0, ignore_eos=True)
    for number in range(REQUESTS):
        prompt = [(7 * i + 13 * (number % (REQUESTS - 1))) % 250 + 1 for i in range(PROMPT)]
        began = perf_counter()
        (request,) = llm.assembly.requests.make(str(number), prompt, params, tenant=str(number))
        track = llm.engine.add(request)
        while track.seq.finish_reason is None:
            llm.engine.step()
        took.append(perf_counter() - began)
        steps.append(track.speculation.steps)
    yield {"requests": took, "steps": steps, "rehearsed": llm.assembly.warmup.num_done}


def measure(folder: Path, given: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """One start, with kernels from `cache`."""
    if given.from_disk:
        forget_files(folder)
    command = [sys.executable, __file__, "--child", "--folder", str(folder), "--drafter", given.drafter]
    began, found = monotonic(), {}
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [*command, "--device", given.device], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    until = {name: round(found[name] - began, 2) for name in ("torch", "foretell", "ready")}
    first, tenth = found["requests"][0], found["requests"][-1]
    a_step = [seconds / steps for seconds, steps in zip(found["requests"], found["steps"], strict=True)]
    return {
        "until": until, "reading": round(found["reading"], 2), "first": round(first, 3), "tenth": round(tenth, 3),
        "first_over_tenth": round(first / tenth, 2), "step_over_step": round(a_step[0] / a_step[-1], 2),
        "requests": [round(each, 3) for each in found["requests"]], "steps": found["steps"],
        "rehearsed": found["rehearsed"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--base", help="a model's name; else random weights of SmolLM2-135M's shape")
    parser.add_argument("--times", type=int, default=7, help="how much wider than SmolLM2-135M")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--from-disk", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        for message in start(given.folder, given.drafter, given.device):
            print(json.dumps(message), flush=True)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place) / "model"
        began = perf_counter()
        if not folder.exists():
            base = load_base(given.base, given.device)
            write_folder(inflate(base, given.times, given.layers), given.base, folder)
            del base
            torch.cuda.empty_cache()
        figures: dict[str, Any] = {"layers": given.layers, "times": given.times, "drafter": given.drafter}
        figures |= {"from_disk": given.from_disk, "written_in": round(perf_counter() - began, 1)}
        figures["gigabytes"] = round(sum(file.stat().st_size for file in folder.iterdir()) / 1e9, 1)
        for name, goal in GOALS.items():
            figures[name] = found = measure(folder, given, Path(place) / "kernels")
            ready, over = found["until"]["ready"], found["first_over_tenth"]
            print(
                f"{name}: ready after {ready:.1f} s (asked: {goal:g}), reading weights {found['reading']:.1f} s; ",
                end="",
            )
            print(f"first request {found['first']:.2f} s, {over:.2f} of the tenth (asked: {MOST_OVER:g}); ", end="")
            print(
                f"{found['steps'][0]} and {found['steps'][-1]} steps, {found['step_over_step']:.2f} a step", flush=True
            )
    if given.device == "cuda":
        figures |= {"device": torch.cuda.get_device_name(), "versions": torch.__version__}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
