"""Further measurements of peers.py: prefill of 512 tokens, and a batch of eight requests."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median
from typing import Any

PROMPT, REQUESTS, TOKENS = 512, 8, 128

Read = Callable[[Sequence[int]], float]  # a prompt's tokens to tokens read a second
Write = Callable[[str], int]  # a prompt to the tokens written


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def llama_reads(port: int) -> Read:
    def read(prompt: Sequence[int]) -> float:
        body = {"prompt": list(prompt), "n_predict": 1, "cache_prompt": False}
        return float(post(port, "/completion", body)["timings"]["prompt_per_second"])

    return read


def we_read(port: int) -> Read:
    asked = count()

    def read(prompt: Sequence[int]) -> float:
        body = {"prompt": list(prompt), "max_tokens": 1, "cache_salt": f"read {next(asked)}"}
        return float(post(port, "/v1/completions", body)["timings"]["prompt_per_second"])

    return read


def llama_writes(port: int) -> Write:
    def write(prompt: str) -> int:
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return int(post(port, "/completion", body)["timings"]["predicted_n"])

    return write


def we_write(port: int, speculative: bool) -> Write:
    asked = count()

    def write(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": f"write {speculative} {next(asked)}"} | ({} if speculative else {"speculative": False})
        return int(post(port, "/v1/completions", body)["timings"]["predicted_n"])

    return write


def reading(ways: Mapping[str, Read], tokens: Sequence[int], rounds: int) -> dict[str, float]:
    """Tokens a second of a prompt, by way, the median of rounds in which they take turns; the first warms up."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        prompt = [tokens[(turn + i) % len(tokens)] for i in range(PROMPT)]
        for name, read in ways.items():
            speed = read(prompt)
            if turn:
                seen[name].append(speed)
    return {name: median(speeds) for name, speeds in seen.items()}


def at_once(ways: Mapping[str, Write], prompts: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the tokens per second of eight concurrent requests, prefill included."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(REQUESTS) as callers:
        for turn in range(rounds + 1):
            some = [prompts[(turn * REQUESTS + i) % len(prompts)] for i in range(REQUESTS)]
            for name, write in ways.items():
                began = time.perf_counter()
                written = sum(callers.map(write, some))
                if turn:
                    seen[name].append(written / (time.perf_counter() - began))
    return {name: median(speeds) for name, speeds in seen.items()}


def report(title: str, speeds: Mapping[str, float]) -> None:
    print(f"\n| {title} | tokens/s |\n| --- | ---: |")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:.0f} |")
    print()
