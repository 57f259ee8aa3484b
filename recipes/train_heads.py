"""Train the heads shipped for smollm2-135m on one GPU: generate answers, then train one head after another.

    python recipes/permissive_prompts.py DATA prompts.jsonl.xz
    python recipes/own_questions.py DATA own.jsonl.xz
    python recipes/train_heads.py heads prompts.jsonl.xz own.jsonl.xz [--budget 1080] [--stop-after 540]

Sequential, because two processes on one GPU each get far less than half of its throughput. A stopped run resumes when
started again. `--back FOLDER` receives the results in a few small files: each head packed with its config and record,
and the answers in two halves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from foretell.models.draft_heads.io import quantize_state
from foretell.train.token_dataset import ANSWERS_FILE, Document, load_documents, save_documents

COMMON = ["--held-out", "256", "--no-measure", "--save-every", "60s", "--check-every", "60s"]
HEADS: dict[str, list[str]] = {
    "eagle": ["--draft-tokens", "6", "--draft-vocab", "12288", "--layers", "2"],
    "block": ["--draft-tokens", "7", "--draft-vocab", "12288", "--layers", "2", "--markov-rank", "32"],
    "distill": ["--layers", "2", "--draft-vocab", "12288"],
    "medusa": ["--draft-tokens", "3", "--draft-vocab", "12288"],
}
SHARES = {"eagle": 0.54, "block": 0.32, "distill": 0.1, "medusa": 0.04}  # of the total time
# Trained in two runs, each for half of that time; the second continues the first at a lower learning rate.
SECOND_RUN = {kind: ["--learning-rate", "7e-3"] for kind in ("eagle", "block")}
FIRST_SUFFIX = "-first"  # folder suffix of the first of two runs
OVERHEAD_SECONDS = 15  # of a run before its first step and after its last
WEIGHTS = "model.safetensors"


def generate_answers(args: argparse.Namespace, more: list[str]) -> None:
    """Generate the answers of each prompt file in its own run, then merge them into one file."""
    documents: list[Document] = []
    for number, prompts in enumerate(args.prompts):
        folder, longest = args.out / f"answers{number}", args.max_tokens[min(number, len(args.max_tokens) - 1)]
        asked = ["--prompts", str(args.prompts_at_most)] if args.prompts_at_most else []
        line = [
            *(sys.executable, "-m", "foretell", "train", "medusa", "--target", args.target, "--data", str(prompts)),
            *("--out", str(folder), "--max-tokens", str(longest), "--context", str(args.context)),
            *("--greedy", str(args.greedy), "--answers-only", *asked, *more),
        ]
        subprocess.run(line, check=True)  # answers of an interrupted run are reused
        documents += load_documents(folder / ANSWERS_FILE)
    save_documents(documents, args.out / ANSWERS_FILE)


def runs(kind: str, out: Path) -> list[tuple[Path, list[str]]]:
    """Return the folders of a kind's runs in order, with their extra flags."""
    if kind not in SECOND_RUN:
        return [(out / kind, [])]
    first = out / f"{kind}{FIRST_SUFFIX}"
    return [(first, []), (out / kind, ["--init", str(first), *SECOND_RUN[kind]])]


def train(kind: str, args: argparse.Namespace, until: float | None, more: list[str]) -> None:
    """Start or resume a kind's runs, until the time `until` at most."""
    several = runs(kind, args.out)
    for folder, own in [each for each in several if not is_done(each[0])]:
        left = None if until is None else until - time.time() - OVERHEAD_SECONDS
        if left is not None and left <= OVERHEAD_SECONDS:
            return
        train_once(kind, folder, args, left, [*own, *more], args.budget * SHARES[kind] / len(several))


def train_once(
    kind: str, folder: Path, args: argparse.Namespace, seconds: float | None, more: list[str], budget: float
) -> None:
    """Run training with a total `budget`, for at most `seconds` of it now."""
    resume = ["--resume"] if (folder / "checkpoint.safetensors").is_file() else []
    piece = [] if seconds is None else ["--piece", f"{seconds:.0f}s"]
    line = [
        *(sys.executable, "-m", "foretell", "train", kind, "--target", args.target),
        *("--answers", str(args.out / ANSWERS_FILE), "--out", str(folder)),
        *("--budget", f"{budget:.0f}s", *COMMON, *HEADS[kind], *piece, *resume, *more),
    ]
    subprocess.run(line, check=True)


def is_done(folder: Path) -> bool:
    record = folder / "run.json"
    return record.is_file() and bool(json.loads(record.read_text())["done"])


def pack_head(args: argparse.Namespace, kind: str) -> None:
    """Pack a head with its config and record into one file."""
    folder = args.out / kind
    if args.back is None or not (folder / WEIGHTS).is_file():
        return
    packed, part = args.out / f"{kind}.packed", args.out / f"{kind}.part"
    save_file(quantize_state(load_file(folder / WEIGHTS)), packed)
    with tarfile.open(part, "w") as tar:
        tar.add(packed, WEIGHTS)
        for name in ("config.json", "run.json"):
            tar.add(folder / name, name)
    args.back.mkdir(parents=True, exist_ok=True)
    shutil.copy2(part, args.back / f"{kind}.tar")


def copy_answers(args: argparse.Namespace) -> None:
    if args.back is not None:
        args.back.mkdir(parents=True, exist_ok=True)
        documents = load_documents(args.out / ANSWERS_FILE)
        for half in (0, 1):
            save_documents(documents[half::2], args.back / f"answers{half}.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--kinds", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--budget", type=float, default=1080.0, help="total training time in seconds")
    parser.add_argument("--stop-after", type=float, help="stop after this many seconds; start again to resume")
    parser.add_argument("--back", type=Path)
    parser.add_argument("--prompts-at-most", type=int)
    parser.add_argument(
        "--max-tokens", type=int, nargs="+", default=[256, 384], help="maximum answer tokens, by prompt file"
    )
    parser.add_argument("--context", type=int, default=1280)
    parser.add_argument("--greedy", type=float, default=0.6)
    args, more = parser.parse_known_args()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / ANSWERS_FILE).is_file():
        generate_answers(args, more)
        copy_answers(args)
        print(f"answers took {time.time() - began:.0f} s", flush=True)
    until = None if args.stop_after is None else began + args.stop_after
    for kind in [each for each in args.kinds if not is_done(args.out / each)]:
        train(kind, args, until, more)
        pack_head(args, kind)
    print(f"{time.time() - began:.0f} s", {kind: is_done(args.out / kind) for kind in args.kinds})


if __name__ == "__main__":
    main()
