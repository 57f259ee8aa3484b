"""The heads that are shipped for smollm2-135m, on one GPU: answers first, then all four at once over the same texts.

    python recipes/permissive_prompts.py DATA prompts.jsonl.xz
    python recipes/train_heads.py prompts.jsonl.xz heads [--budget 700] [--piece 450] [--resume]

A piece ends after so many seconds and is gone on with by `--resume`. `--back FOLDER` gets what is worth keeping, small
enough to be carried elsewhere: each head with its record, and the answers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from foretell.models.heads.packed import pack_state
from foretell.train.documents import load_documents, save_documents

COMMON = ["--held-out", "256", "--batch-tokens", "8192", "--warmup", "60", "--no-measure", "--save-every", "120s", "--check-every", "40s"]
HEADS: dict[str, list[str]] = {
    "eagle": ["--draft-tokens", "6", "--draft-vocab", "8192"],
    "block": ["--draft-tokens", "7", "--draft-vocab", "8192", "--layers", "2", "--markov-rank", "16"],
    "distill": ["--layers", "4", "--draft-vocab", "8192"],
    "medusa": ["--draft-tokens", "3", "--draft-vocab", "8192"],
}
SHARES = {"medusa": 0.14, "distill": 0.45}  # of the whole time, where less will do


def command(kind: str, args: argparse.Namespace, budget: float, more: list[str]) -> list[str]:
    resume = ["--resume"] if args.resume and (args.out / kind / "checkpoint.safetensors").is_file() else []
    piece = [] if args.piece is None else ["--piece", f"{args.piece}s"]
    return [
        *(sys.executable, "-m", "foretell", "train", kind, "--target", args.target),
        *("--answers", str(args.out / "answers.npz"), "--out", str(args.out / kind), "--budget", f"{budget}s"),
        *(*COMMON, *HEADS[kind], *piece, *resume, *more),
    ]


def write_answers(args: argparse.Namespace, more: list[str]) -> None:
    """By a run of no steps: it writes answers and says what training would take."""
    asked = ["--prompts", str(args.prompts_at_most)] if args.prompts_at_most else []
    line = [
        *(sys.executable, "-m", "foretell", "train", "medusa", "--target", args.target, "--data", str(args.prompts)),
        *("--out", str(args.out), "--max-tokens", str(args.max_tokens), "--context", str(args.context), "--dry-run"),
        *("--greedy", str(args.greedy), *asked, *more),
    ]
    subprocess.run(line, check=True)


def bring_back(args: argparse.Namespace) -> None:
    """What is there now, whole: files are replaced at once."""
    if args.back is None:
        return
    for kind in args.kinds:
        folder = args.out / kind
        if not (folder / "model.safetensors").is_file():
            continue
        packed = args.out / f"{kind}.packed"
        save_file(pack_state(load_file(folder / "model.safetensors")), packed)
        with tarfile.open(args.out / f"{kind}.part", "w") as tar:
            tar.add(packed, "model.safetensors")
            for name in ("config.json", "run.json"):
                if (folder / name).is_file():
                    tar.add(folder / name, name)
        shutil.copy2(args.out / f"{kind}.part", args.back / f"{kind}.tar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--kinds", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--budget", type=float, default=700.0, help="seconds of training in all, all kinds at once")
    parser.add_argument("--piece", type=float, help="seconds until this piece ends")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--back", type=Path)
    parser.add_argument("--prompts-at-most", type=int)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=1280)
    parser.add_argument("--greedy", type=float, default=0.6)
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "answers.npz").is_file():
        began = time.time()
        write_answers(args, more)
        print(f"answers took {time.time() - began:.0f} s", flush=True)
    if args.back is not None and not args.resume:
        args.back.mkdir(parents=True, exist_ok=True)
        documents = load_documents(args.out / "answers.npz")
        for part in (0, 1):
            save_documents(documents[part::2], args.back / f"answers{part}.npz")
    running = {}
    for kind in args.kinds:
        log = (args.out / f"{kind}.log").open("a")
        line = command(kind, args, args.budget * SHARES.get(kind, 1.0), more)
        running[kind] = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
    while any(process.poll() is None for process in running.values()):
        time.sleep(10)
        bring_back(args)
        print(*(f"{kind}: {last_line(args.out / f'{kind}.log')}" for kind in args.kinds), sep="\n", flush=True)
    bring_back(args)
    print({kind: process.returncode for kind, process in running.items()})


def last_line(path: Path) -> str:
    lines = path.read_text().strip().split("\n")
    return lines[-1][:160]


if __name__ == "__main__":
    main()
