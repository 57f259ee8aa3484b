"""An engine whose process may not allocate much more than it has: a program, run by test_memory_limits.py.

It prints one JSON object: what the requests came to before, under and after a limit on the address space.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from foretell.engine.async_engine import AsyncEngine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.models.config import ModelConfig
from foretell.models.draft_heads import EagleConfig, LayerConfig
from foretell.sampling_params import SamplingParams
from tests.tiny import CONTEXT, VOCAB, OwnHead, World

REQUESTS = 24
WIDE = ModelConfig(vocab=VOCAB, width=512, layers=2, heads=8, kv_heads=4, head_dim=64, ffn=1536, context=CONTEXT)
HEAD = EagleConfig(LayerConfig(width=512, heads=8, kv_heads=4, head_dim=64, ffn=1536), VOCAB, 512, (0, 1, 2))
# A step of 4800 rows works in about 140 MB, and a head that reads them in as much again.
WORLD = World(config=WIDE, page_size=16, pages=512, max_step_tokens=4800, max_num_seqs=REQUESTS, prefix_cache=False)


def prompt(number: int) -> list[int]:
    """Return a long prompt."""
    return [1 + (number * 7 + i * i) % (VOCAB - 1) for i in range(200)]


async def ask(engine: AsyncEngine, name: str, number: int) -> list[int] | str:
    """Return the tokens of a request, or the name of its error."""
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset({0}), VOCAB), None, engine.engine.drafter)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=number, temperature=float(number % 2))
    try:
        stream = engine.submit(maker.make(name, prompt(number), params))
        return [token async for piece in stream.items() for token in piece.delta.tokens]
    except Exception as error:
        return type(error).__name__


def limit_address_space(spare: int | None) -> None:
    """Allow so many bytes more than are mapped now; None lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    found = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    mapped = int(found[1]) * 1024 if found else 0
    resource.setrlimit(resource.RLIMIT_AS, (hard if spare is None else mapped + spare, hard))


async def play(spare: int) -> dict[str, Any]:
    engine = AsyncEngine(WORLD.engine(OwnHead(HEAD, packed=True)), REQUESTS)
    engine.start()
    found: dict[str, Any] = {}
    try:
        found["alone"] = [await ask(engine, f"alone-{i}", i) for i in range(REQUESTS)]
        limit_address_space(spare)
        found["limited"] = await asyncio.gather(*(ask(engine, f"limited-{i}", i) for i in range(REQUESTS)))
        limit_address_space(None)
        found["after"] = await asyncio.gather(*(ask(engine, f"after-{i}", i) for i in range(REQUESTS)))
        found["steps_shed"], found["failure"] = engine.engine.oom_backoff.num_ooms, engine.failure
    finally:
        limit_address_space(None)
        await engine.stop()
    return found


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(asyncio.run(play(int(sys.argv[1])))))
