"""Foretell against vLLM on one CUDA device in one run: plain speed, speculation, time to first token and start-up.

Run it as `python bench/gpu_peers.py --base smollm2-135m [--vllm-path DIR] [--seconds 540] [--out FILE]`. Both read the
same folders in bf16 (`inflate.py`): 5.9 billion weights that say what the base says, and the base in 4 bits as
draft model.
`DIR` goes before the other paths of vLLM's processes, and of theirs only. Every configuration of vLLM has a process;
all start at once, as far as memory goes, and what is measured runs alone while the others sleep. A configuration that
fails is reported and left out. Each figure is a line of JSON as it comes; tables are last.
`--device cpu --times 1 --layers 2 --peers none --tokens 8` tries the script elsewhere.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_peers_cells import AT_ONCE, LONGEST_PROMPT, Cells, prompts_of
from gpu_peers_report import OURS, VLLM, Report
from gpu_peers_run import HERE, Folders, Limits, Peer, Run

GIB = 1 << 30
LONGEST = 4096  # tokens of a text, prompt included
ONE_CACHE, MANY_CACHE = 0.8, 4.0  # GiB for keys and values of one text at a time, and of 32
ONE_WORK, MANY_WORK = 2.0, 2.8  # GiB of workspace, CUDA graphs and libraries
SPARE = 10.0  # GiB of the device left free
ONE_STEP = 4096  # prefill tokens per step of vLLM at batch size 1
DRAFTS, NGRAMS = (2, 4, 3, 1, 5), (5, 3)  # draft lengths of vLLM, most important first
BASE_LAYERS = 30


def peers(given: argparse.Namespace) -> list[Peer]:
    """By weight: what is asked for first comes first."""
    weights, draft = folder_gib(given.folder), folder_gib(given.draft)
    many, one = weights + MANY_CACHE + MANY_WORK, weights + draft + ONE_CACHE + ONE_WORK
    ours = Peer(OURS, our_settings(given), many + draft)
    if given.peers == "none":
        return [ours]
    plain = Peer(VLLM, vllm_settings(given, AT_ONCE, MANY_CACHE), many)
    configs: dict[str, dict[str, Any]] = {
        f"vllm draft {k}": {"method": "draft_model", "model": str(given.draft), "num_speculative_tokens": k}
        for k in DRAFTS
    }
    lookup = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    configs |= {f"vllm n-gram {k}": lookup | {"num_speculative_tokens": k} for k in NGRAMS}
    alone = vllm_settings(given, 8, ONE_CACHE) | {"max_num_batched_tokens": ONE_STEP}
    speculative = [Peer(name, alone | {"speculative_config": config}, one) for name, config in configs.items()]
    return [plain, ours, *speculative]


def our_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return one engine with all drafters; 0.5 GiB of KV cache is enough to try the script on a CPU."""
    draft, on_gpu = f"model:{given.draft}", given.device == "cuda"
    ways: dict[str, dict[str, Any]] = {
        "plain": {"drafter": "none"},
        "draft, 4 tokens": {"drafter": draft, "num_speculative_tokens": 4},
        "draft": {"drafter": draft},
        "n-gram": {"drafter": "ngram"},
        "auto": {"drafter": "auto"},
        "auto and draft": {"drafter": f"auto,{draft}"},
    }
    settings = {
        "model": str(given.folder), "device": given.device, "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": given.longest, "max_num_seqs": AT_ONCE, "kv_memory": MANY_CACHE if on_gpu else 0.5,
        "prefix_cache": False, "gpu_memory_utilization": 1.0,
    }  # fmt: skip
    return {"ways": ways, "settings": settings}


def vllm_settings(given: argparse.Namespace, max_num_seqs: int, cache: float) -> dict[str, Any]:
    """Its own ways but for room. The cache is set: to find out how much there is, it would count as its own what others
    take meanwhile. `gpu_memory_utilization` is then only what must be free when it begins."""
    return {
        "model": str(given.folder), "dtype": "bfloat16", "max_model_len": given.longest, "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": int(cache * GIB), "gpu_memory_utilization": given.utilization,
        "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip


def write_folders(given: argparse.Namespace) -> None:
    """The target, and the base in 4 bits, where they are not there yet, by processes whose memory ends with them."""
    script = [sys.executable, str(HERE / "inflate.py")]
    common = ["--device", given.device, *(["--base", given.base] if given.base else [])]
    small = ["--times", "1", "--layers", str(min(given.layers, BASE_LAYERS))]
    wanted = {
        given.folder: ["--times", str(given.times), "--layers", str(given.layers)],
        given.draft: [*small, "--bits", "4"],
    }
    started = [
        subprocess.Popen([*script, str(folder), *options, *common])
        for folder, options in wanted.items()
        if not folder.exists()
    ]
    ended = [process.wait() for process in started]
    if any(ended):
        raise SystemExit("the folders could not be written; what is there of them is to be removed first")


def folder_gib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / GIB


def free_gib(device: str) -> float:
    """Of the device, asked of its driver; without an answer all is tried at once."""
    if device != "cuda":
        return float("inf")
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return float("inf")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="the target; written where it is not there, and kept")
    parser.add_argument("--draft", type=Path, help="the draft model; likewise")
    parser.add_argument("--base", help="a model's name; else random weights of SmolLM2-135M's shape")
    parser.add_argument("--times", type=int, default=7, help="how much wider than the base")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--vllm-path", type=Path, help="a folder with vLLM and what it needs")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it but the writing of folders")
    parser.add_argument("--loading", type=float, default=240.0, help="seconds, the most until all are ready")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", type=int, default=8, help="at batch 1")
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a text, prompt included")
    parser.add_argument("--utilization", type=float, default=0.09, help="of memory, what vLLM wants to be free first")
    parser.add_argument("--alone", action="store_true", help="in the end start ours and plain vLLM by themselves, too")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON and the tables")
    parser.add_argument("--logs", type=Path, help="a folder where logs stay")
    return parser.parse_args(words)


def stop(*_: object) -> None:
    """Report what was measured so far."""
    raise SystemExit("stopped")


def main(words: list[str] | None = None) -> None:
    given = arguments(words)
    with tempfile.TemporaryDirectory() as scratch:
        given.folder, given.draft = given.folder or Path(scratch) / "target", given.draft or Path(scratch) / "draft"
        logs = given.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        write_folders(given)
        longest = min(LONGEST_PROMPT, given.longest - given.tokens)
        prompts = prompts_of(given.folder, AT_ONCE, longest)
        cells, report = Cells(prompts, given.texts, given.tokens, given.longest), Report(given.out)
        limits = Limits(given.seconds, given.loading, given.rounds)
        going = Run(cells, limits, Folders(given.vllm_path, logs, Path(scratch) / "caches"), report)
        wanted = peers(given)
        try:
            going.all(wanted, free_gib(given.device) - SPARE)
            if given.alone:
                going.alone([peer for peer in wanted if peer.name in (OURS, VLLM)])
        finally:
            going.end()
            report.tell()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    main()
