"""Accepted per step of drafters over the first prompts of each task, batched: what a head is worth, without a clock.

    python bench/accepted_per_step.py --data SPEC_BENCH --per-task 10 --tokens 256 eagle@5 distilled@5 block@7 medusa@3
    python bench/accepted_per_step.py --data SPEC_BENCH --per-task 10 --tokens 256 --temperature 1 eagle@5 distilled@5
    python bench/accepted_per_step.py --data SPEC_BENCH --per-task 4 --tokens 96 --context 4096 eagle@5

Tokens of a task over its steps, and the mean of the tasks. Without --data the bench's own prompts are taken. With
--context each question follows so many tokens of other ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from foretell import LLM, SamplingParams
from foretell.bench.workloads import BenchPrompt, load
from foretell.tokenizer import Tokenizer


def chosen(data: Path | None, per_task: int) -> list[BenchPrompt]:
    items = load("own" if data is None else "spec-bench", data, [])
    by_task: dict[str, list[BenchPrompt]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for some in by_task.values() for item in some[:per_task]]


def said_before(items: list[BenchPrompt], index: int, tokens: int, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """An earlier turn of about so many tokens, made of the other questions."""
    others = items[index + 1 :] + items[:index]
    questions = [item.text or " ".join(str(each["content"]) for each in item.messages) for item in others]
    filler = tokenizer.decode(tokenizer.encode("\n\n".join(questions))[:tokens])
    return [{"role": "user", "content": filler}, {"role": "assistant", "content": "What would you like to know?"}]


def accepted(name: str, items: list[BenchPrompt], args: argparse.Namespace) -> dict[str, float]:
    """Return tokens per step by task of a drafter with its draft length, such as eagle@5."""
    drafter, _, draft_length = name.rpartition("@")
    llm = LLM(
        args.model, drafter=drafter, num_speculative_tokens=int(draft_length), rule=args.rule, prefix_cache=False,
        device=args.device, max_num_seqs=args.at_once, quiet=True,
    )  # fmt: skip
    chats = [[{"role": "user", "content": item.text}] if item.text else list(item.messages) for item in items]
    if args.context:
        chats = [said_before(items, i, args.context, llm.tokenizer) + chat for i, chat in enumerate(chats)]
    params = [SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=i) for i in range(len(items))]
    tokens: dict[str, int] = {}
    steps: dict[str, int] = {}
    for item, output in zip(items, llm.chat(chats, params), strict=True):
        tokens[item.task] = tokens.get(item.task, 0) + output.speculation.tokens
        steps[item.task] = steps.get(item.task, 0) + output.speculation.steps
    return {task: round(tokens[task] / steps[task], 3) for task in tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="NAME@LENGTH")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, help="the folder of Spec-Bench")
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rule", default="match")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--at-once", type=int, default=64, help="batch size")
    parser.add_argument("--context", type=int, default=0, help="tokens before each question")
    args = parser.parse_args()
    if wrong := [name for name in args.drafters if not name.rpartition("@")[2].isdigit() or "@" not in name]:
        parser.error(f"{wrong[0]} has no draft length; write {wrong[0].partition('@')[0]}@5")
    if min(args.context, args.per_task - 1, args.tokens - 1) < 0:
        parser.error("--context must be 0 or more, --per-task and --tokens 1 or more")
    items = chosen(args.data, args.per_task)
    for name in args.drafters:
        found = accepted(name, items, args)
        print(json.dumps({"drafter": name, **found, "mean": round(fmean(found.values()), 3)}), flush=True)


if __name__ == "__main__":
    main()
