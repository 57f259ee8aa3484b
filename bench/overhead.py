"""Time of the server outside of engine steps: python bench/overhead.py

Streams from `foretell serve` at once, as callers read them. The event loop of the server has a thread of its own: its
processor time (HTTP, JSON, events, counting) is compared with the wall time of the engine's steps, which detokenise.
Callers and server share this machine, so wall times of the whole would tell of the callers as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from foretell import LLM
from foretell.bench.http_client import Address, stream_request
from foretell.bench.server_process import ServerProcess, start_server
from foretell.engine.detokenizer import Detokenizer
from foretell.sampling_params import SamplingParams
from foretell.types import Request

STREAMS = {1: 0.05, 32: 0.10}  # at once, and the share of a step that it may cost
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """Totals since the server started."""

    loop: float  # seconds of processor time
    steps: int
    seconds: float  # of steps by the wall clock

    @classmethod
    def of(cls, server: ServerProcess) -> Reading:
        with urllib.request.urlopen(f"{server.url}/metrics") as reply:
            text = reply.read().decode()
        return cls(_processor_time(server.pid), int(_metric(text, "count")), _metric(text, "sum"))

    def __sub__(self, other: Reading) -> Reading:
        return Reading(self.loop - other.loop, self.steps - other.steps, self.seconds - other.seconds)


def _processor_time(pid: int) -> float:
    """Of the main thread, which runs the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def _metric(text: str, part: str) -> float:
    found = re.search(rf"^foretell:step_seconds_{part}(?:\{{.*\}})? (\S+)$", text, re.M)
    assert found is not None, "the metric is there"
    return float(found[1])


async def streams(server: ServerProcess, count: int, seconds: float, speculative: bool) -> None:
    address, until = Address.parse(server.url), time.monotonic() + seconds

    async def caller(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            words = [{"role": "user", "content": f"Tell me story {number}.{turn} of a lighthouse and its keeper."}]
            body = {"messages": words, "max_tokens": 128, "ignore_eos": True, "stream": True}
            answer = await stream_request(address, body if speculative else body | {"speculative": False})
            assert answer.error is None, answer.error

    await asyncio.gather(*(caller(number) for number in range(count)))


def detokenising() -> float:
    """Seconds a token, in the engine's own thread."""
    llm = LLM(drafter="none", quiet=True, kv_memory=0.5)
    tokens = llm.tokenizer.encode("The lighthouse keeper walked along the shore, and no one had seen him since. " * 40)
    detokenizer = Detokenizer(Request("x", (1,), SamplingParams(), 0, len(tokens) + 1), llm.tokenizer)
    began = time.perf_counter()
    for token in tokens:
        detokenizer.append([token])
        detokenizer.pop_text()
    return (time.perf_counter() - began) / len(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    detoken = detokenising()
    print("| streams | speculation | steps | step | event loop a step | detokenising | share of a step | may be |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    found, held = [], True
    with start_server({}) as server:
        for count, most in STREAMS.items():
            for speculative in (False, True):
                asyncio.run(streams(server, count, 2, speculative))
                before = Reading.of(server)
                asyncio.run(streams(server, count, args.seconds, speculative))
                seen = Reading.of(server) - before
                step, loop = seen.seconds / seen.steps, seen.loop / seen.steps
                share = (loop + count * detoken) / step
                held &= share <= most
                found.append({"streams": count, "speculative": speculative, "step": step, "loop": loop, "share": share})
                words = "auto" if speculative else "off"
                print(
                    f"| {count} | {words} | {seen.steps} | {step * 1e3:.2f} ms | {loop * 1e3:.2f} ms "
                    f"| {count * detoken * 1e3:.2f} ms | {share:.1%} | {most:.0%} |"
                )
    print(json.dumps({"bench": "overhead", "detokenising": detoken, "found": found}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
