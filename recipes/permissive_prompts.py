"""Permissively licensed prompts for training heads, from a folder of public data sets, as lines {"prompt", "source"}.

The folder has gsm8k (train), super_natural_instructions, t0_50k, self_instruct, gpteacher, mbpp and dolly_subset, and
the benchmarks (spec_bench, mt_bench, humaneval, the test half of gsm8k). A prompt that shares 14 consecutive words with
a benchmark is excluded. Answers are dropped: the target generates them.
Run it as `python recipes/permissive_prompts.py DATA prompts.jsonl.xz`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WINDOW = 14  # consecutive words that must not occur in a benchmark
MAX_CHARACTERS = 6000  # of a prompt
MAX_PER_TEMPLATE = 60  # prompts per template of t0_50k, which repeats content across templates
MAX_PER_TASK = 16  # prompts per task of super_natural_instructions
MAX_TOOL_PROMPTS = 1500  # of the tool-use set, whose long headers are all alike
OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def read(path: Path) -> list[dict[str, Any]]:
    """Yield the objects of a JSON lines file or a JSON list."""
    with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.split("\n") if line]
    )


def joined(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts if part and part.strip())


def capped(items: Iterable[tuple[str, str]], most: int, rng: random.Random) -> Iterator[str]:
    """Return the prompts shuffled, with a limit per group."""
    taken: Counter[str] = Counter()
    shuffled = list(items)
    rng.shuffle(shuffled)
    for group, text in shuffled:
        taken[group] += 1
        if taken[group] <= most:
            yield text


def prompts(data: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield each prompt with the name of its data set."""
    for row in read(data / "gsm8k/train.jsonl.gz"):
        yield "gsm8k", row["question"]
    for row in read(data / "dolly_subset/dolly_3k.json.xz"):
        yield "dolly", joined(row["instruction"], row["input"])
    for row in read(data / "dolly_subset/dolly_instr_6400.jsonl.xz"):
        yield "dolly", row["instruction"]
    for name, most in (("codegen-instruct", None), ("roleplay-simple-deduped-roleplay-instruct", None)):
        for row in read(data / f"gpteacher/{name}.json.xz")[:most]:
            yield "gpteacher", joined(row["instruction"], row["input"])
    tools = read(data / "gpteacher/toolformer-similarity-0.9-dataset.json.xz")
    for row in rng.sample(tools, min(MAX_TOOL_PROMPTS, len(tools))):
        yield "gpteacher", joined(row["instruction"], row["input"])
    for row in read(data / "mbpp/mbpp.jsonl"):
        yield "mbpp", joined(row["text"], "Your code should pass this test:", row["test_list"][0])
    for row in read(data / "self_instruct/user_oriented_instructions.jsonl"):
        yield "self_instruct", joined(row["instruction"], row["instances"][0]["input"])
    tasks = {r["task"]: r["definition"] for r in read(data / "super_natural_instructions/task_definitions.jsonl.xz")}
    rows = read(data / "super_natural_instructions/sni_english_sample.jsonl.xz")
    pairs = [(row["task"], joined(tasks[row["task"]], row["input"])) for row in rows if row["task"] in tasks]
    yield from (("super_natural_instructions", text) for text in capped(pairs, MAX_PER_TASK, rng))
    rows = read(data / "t0_50k/t0_train_50k.jsonl.xz")
    yield from (("t0", text) for text in capped(((r["template"], r["prompt"]) for r in rows), MAX_PER_TEMPLATE, rng))


def windows(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[i : i + WINDOW]) for i in range(len(words) - WINDOW + 1))


def measured(data: Path) -> set[tuple[str, ...]]:
    """Return every window of words in the benchmarks."""
    names = ("spec_bench/question.jsonl", "gsm8k/test.jsonl")
    paths = [data / name for name in names]
    paths += [path for name in ("mt_bench", "humaneval") for path in sorted((data / name).glob("*.json*"))]
    contents = (text for path in paths for row in read(path) for text in strings(row))
    return {run for text in contents for run in windows(text)}


def strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, forbidden = random.Random(args.seed), measured(args.data)
    kept: dict[str, str] = {}
    shared = 0
    for source, text in prompts(args.data, rng):
        text = text.strip()
        if not 8 <= len(text) <= MAX_CHARACTERS or text in kept:
            continue
        if any(run in forbidden for run in windows(text)):
            shared += 1
        else:
            kept[text] = source
    lines = [json.dumps({"prompt": text, "source": source}, ensure_ascii=False) for text, source in kept.items()]
    rng.shuffle(lines)
    with OPENERS.get(args.out.suffix, open)(args.out, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts {dict(Counter(kept.values()))}; {shared} left out: they stand in what is measured")


if __name__ == "__main__":
    main()
