"""What rounding the weights, or keys and values, does to the text: python bench/quality.py [--text FILE] [--text FILE]

Perplexity over windows of plain text (the prompts that ship with the package, where no file is named), how often the
argmax token is that of float32, and how far greedy answers go before they part. FILE may be packed
with xz.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from foretell import LLM, SamplingParams
from foretell.bench.workloads import load, select

# Format of the weights and data type of the KV cache.
ARMS = {name: (name, "float32") for name in ("none", "int8", "int4")} | {
    f"KV {kv_cache_dtype}": ("none", kv_cache_dtype) for kv_cache_dtype in ("bfloat16", "float16", "int8")
}


@dataclass(frozen=True)
class Reading:
    """How a model reads windows of text, and what it answers."""

    logprobs: list[float]
    argmax: list[int]
    answers: list[tuple[int, ...]]

    @property
    def perplexity(self) -> float:
        return math.exp(-fmean(self.logprobs))


def text_of(path: Path) -> str:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        found: str = file.read()
    return found


def own_text() -> str:
    """All that is asked in our own workload."""
    return "\n\n".join(str(message["content"]) for item in load("own") for message in item.messages)


def read(quantization: str, kv_cache_dtype: str, documents: list[str], args: argparse.Namespace) -> Reading:
    llm = LLM(drafter="none", quiet=True, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    logprobs: list[float] = []
    argmax: list[int] = []
    for text in documents:
        tokens = llm.tokenizer.encode(text[: args.windows * args.window * 8], add_special=False)
        for start in range(0, args.windows * args.window, args.window):
            window = tokens[start : start + args.window]
            if len(window) < 2:  # the text has ended
                break
            (found,) = llm.generate(
                {"prompt_token_ids": window}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            )
            for token, each in zip(window, found.prompt_logprobs or (), strict=True):
                if each is not None:
                    logprobs.append(each[token].logprob)
                    argmax.append(next(id for id, one in each.items() if one.rank == 1))
    items, _ = select(load("own"), 2, lambda item: True)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    outputs = [llm.chat(item.messages, params)[0] for item in items]
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    return Reading(logprobs, argmax, answers)


def agreed(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", help="default: the prompts that ship with the package")
    parser.add_argument("--windows", type=int, default=16, help="of each file")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    documents = [text_of(path) for path in args.text] if args.text else [own_text()]
    found: dict[str, Reading] = {}
    print("| weights | perplexity | same argmax token | greedy tokens before the first difference |")
    print("| --- | ---: | ---: | ---: |")
    kept = {}
    for name, (quantization, kv_cache_dtype) in ARMS.items():
        found[name] = reading = read(quantization, kv_cache_dtype, documents, args)
        gc.collect()
        reference = found["none"]
        same = fmean(a == b for a, b in zip(reading.argmax, reference.argmax, strict=True))
        pairs = list(zip(reading.answers, reference.answers, strict=True))
        share = sum(agreed(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs)
        kept[name] = {"perplexity": reading.perplexity, "same_likeliest": same, "same_greedy": share}
        shown = "float32" if name == "none" else name
        print(f"| {shown} | {reading.perplexity:.3f} | {same:.2%} | {share:.1%} |", flush=True)
    print(json.dumps({"bench": "quality", "tokens": len(found["none"].logprobs), **kept}))


if __name__ == "__main__":
    main()
