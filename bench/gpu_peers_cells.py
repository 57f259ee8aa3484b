"""What `gpu_peers.py` has engines write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from engine_child import Job
from gpu_peers_report import FIRST, MANY, ONE

from foretell.bench.workloads import load
from foretell.build.model_source import read_tokenizer
from foretell.hub import open_checkpoint, resolve

LONG_PROMPT, LONG_PROMPTS = 2048, 4  # tokens of a prompt whose first token is waited for, and such prompts
LONGEST_PROMPT = 1024  # tokens
AT_ONCE = 32
SAMPLED = f"{ONE}, T=1"

Cell = tuple[str, Job]


def prompts_of(folder: Path, count: int, longest: int) -> list[list[int]]:
    """Of the package's own workload, tasks in turn, none longer than `longest`."""
    tokenizer = read_tokenizer(open_checkpoint(resolve(str(folder))))

    def encoded(messages: Sequence[Any]) -> list[int]:
        if tokenizer.chat_template:
            return tokenizer.encode_chat(messages)
        return tokenizer.encode("\n\n".join(str(message["content"]) for message in messages))

    found: list[tuple[int, list[int]]] = []
    seen: dict[str, int] = {}
    for item in load("own"):
        prompt = encoded(item.messages)[:longest]
        found.append((seen.get(item.task, 0), prompt))
        seen[item.task] = seen.get(item.task, 0) + 1
    return [prompt for _, prompt in sorted(found, key=lambda each: each[0])][:count]


class Cells:
    """Jobs by measurement: `prompts` of `tokens` output tokens sequentially, and 32 in a batch."""

    def __init__(self, prompts: list[list[int]], num_prompts: int, tokens: int, longest: int) -> None:
        words = [token for prompt in prompts for token in prompt]
        size = min(LONG_PROMPT, longest // 2)
        long = [list(islice(cycle(words[97 * i :] + words[: 97 * i]), size)) for i in range(LONG_PROMPTS)]
        self.one = Job(prompts[:num_prompts], 1, tokens)
        many = Job(prompts, len(prompts), tokens)
        self.plain: list[Cell] = [(ONE, self.one), (MANY, many), (FIRST, Job(long, 1, 1))]
        sampled = replace(self.one, temperature=1.0)
        self.ours: list[Cell] = [(SAMPLED, sampled)]
        for way in ("draft, 4 tokens", "auto", "draft", "n-gram", "auto and draft"):
            self.ours += [(ONE, replace(self.one, way=way)), (SAMPLED, replace(sampled, way=way))]
        self.ours.append((MANY, replace(many, way="auto")))

    @property
    def speculative(self) -> list[Cell]:
        """Return the cells of another engine with speculation."""
        return [(ONE, self.one)]
