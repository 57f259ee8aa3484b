"""Whether a server takes the memory it announces: python bench/memory.py

64 callers keep `foretell serve` busy with prompts that fill its cache; the most memory the process ever had is compared
with what /server_info said at the start. Pages take memory when first used, so the load goes on until all of them were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from foretell.bench.http_client import Address, stream_request
from foretell.bench.server_process import ServerProcess, start_server
from foretell.config import EngineConfig
from foretell.server.memory_report import process_memory

TOLERANCE = 0.05
WORDS, TOKENS = 400, 24
MIB = 1 << 20


async def load(server: ServerProcess, callers: int, seconds: float, tokens: int) -> int:
    """Ask for at least so long, and until so many tokens were read or written; how many answers came."""
    address, loop = Address.parse(server.url), asyncio.get_running_loop()
    until, answers, read = loop.time() + seconds, 0, 0

    async def caller(number: int) -> None:
        nonlocal answers, read
        turn = 0
        while loop.time() < until or read < tokens:
            turn += 1
            answer = await stream_request(address, body(f"{number}.{turn}"))
            assert answer.error is None, answer.error
            answers += 1
            read += WORDS + TOKENS

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return answers


def body(mark: str) -> dict[str, Any]:
    """A chat that has no beginning in common with another."""
    words = " ".join(f"word{mark}" if i % 50 == 0 else "word" for i in range(WORDS))
    messages = [{"role": "user", "content": words}]
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True, "stream": True}


def announced_bytes(server: ServerProcess) -> dict[str, int]:
    with urllib.request.urlopen(f"{server.url}/server_info") as reply:
        memory: dict[str, int] = json.load(reply)["memory"]
    return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, help="a shorter one has a smaller cache, which is full sooner")
    args = parser.parse_args()
    with start_server({"max_model_len": args.max_model_len}) as server:
        announced = announced_bytes(server)
        tokens = announced["pages"] * EngineConfig().page_size
        answers = asyncio.run(load(server, args.callers, args.seconds, tokens))
        peak = process_memory(Path(f"/proc/{server.pid}")).peak
    for name, size in announced.items():
        print(f"{name}: {size}" if name == "pages" else f"{name}: {size / MIB:.0f} MiB")
    off = peak / announced["total"] - 1
    print(f"peak after {answers} answers: {peak / MIB:.0f} MiB, {off:+.1%} of what was announced")
    print(json.dumps({"announced": announced["total"], "peak": peak, "off": off, "answers": answers}))
    return 0 if abs(off) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
