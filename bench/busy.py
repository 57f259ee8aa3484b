"""A step beside a busy process, by how long idle threads spin: python bench/busy.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SETTINGS = {
    "GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},  # GNU OpenMP's own default
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},  # for ever: an idle engine would keep a core busy
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=5000 (ours)": {"GOMP_SPINCOUNT": "5000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
STEP = """
import time
from statistics import median
from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.types import Draft, Share

llm = LLM(quantization="none", quiet=True, max_model_len=256, max_num_seqs=1)
(request,) = llm._requests(llm.tokenizer.encode("x " * 60), SamplingParams(max_tokens=8), SpeculationChoice())
track = llm.engine.add(request)
llm.engine.step()
seen, began = [], time.perf_counter()
while time.perf_counter() - began < 4:
    at = time.perf_counter()
    llm.engine.runner.forward([Share.of(track.seq, 1)], [Draft()])
    seen.append(time.perf_counter() - at)
print(median(seen) * 1e3)
"""


def step_ms(env: dict[str, str]) -> float:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", STEP], env=clean | env, capture_output=True, text=True, check=True)
    return float(done.stdout)


NEIGHBOURS = {
    "a busy loop": "while True: pass",
    "a busy loop of low priority": "import os; os.nice(10)\nwhile True: pass",
    "torch, one thread": "import torch; torch.set_num_threads(1)\nx = torch.randn(64, 64)\nwhile True: x @ x",
}


def beside(neighbour: str, env: dict[str, str]) -> float:
    with subprocess.Popen([sys.executable, "-c", neighbour]) as child:
        try:
            return step_ms(env)
        finally:
            child.kill()


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    for name, env in SETTINGS.items():
        found[name] = {"alone": step_ms(env)} | {who: beside(code, env) for who, code in NEIGHBOURS.items()}
        print(f"{name:28}", "  ".join(f"{who} {ms:.1f} ms" for who, ms in found[name].items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
