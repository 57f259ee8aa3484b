"""Replicas on Ray: python bench/replicas.py [routing|kill|update|cost] (needs the extra `cluster`)

`routing`: how much of the prompts of conversations is found in a cache, by routing. `kill`: a replica is killed under
load. `update`: all are replaced under load. `cost`: the time of a request compared with a single server. It uses
the tiny model of the tests, because the time around the model is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' servers and callers

from tests.cluster.load import Load, environment, replica_pids, wait_for  # noqa: E402
from tests.server.process import ServerProcess, write_server_folder  # noqa: E402

REPLICAS = 2
CONVERSATIONS, TURNS, AT_ONCE = 16, 6, 4
SYSTEM = "You are a helpful fox. You answer in short sentences, and you never mention the lazy dog to anybody. "
QUESTION = "Caller {0} asks in turn {1}: what did the quick brown fox number {2} do after it had jumped?"
ROOM = ("--kv-memory", "0.02")  # GiB: all conversations fit into the cache of one replica


def routing(folder: Path) -> dict[str, Any]:
    """Conversations whose turns come in a mixed order, over each way to choose a replica."""
    arms = [("one replica", 1, "prefix"), *((name, REPLICAS, name) for name in ("prefix", "least_loaded", "random"))]
    found = {}
    for name, count, way in arms:
        with ServerProcess(folder, "--replicas", str(count), "--routing", way, *ROOM) as server:
            found[name] = converse(server)
        print(f"{name:14} cached {found[name]['share']:.3f} of {found[name]['prompt_tokens']} prompt tokens")
    return found


def converse(server: ServerProcess) -> dict[str, Any]:
    """All conversations, some at once; each turn sends what was said before it."""
    order = random.Random(0)
    left = dict.fromkeys(range(CONVERSATIONS), TURNS)
    said: dict[int, list[dict[str, str]]] = {i: [{"role": "system", "content": SYSTEM}] for i in left}
    usages = []
    with ThreadPoolExecutor(AT_ONCE) as callers:
        while left:
            chosen = order.sample(sorted(left), min(AT_ONCE, len(left)))
            usages += callers.map(lambda i: turn(server, i, said[i]), chosen)
            for i in chosen:
                left[i] -= 1
            left = {i: turns for i, turns in left.items() if turns}
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "cached_tokens": cached, "share": cached / prompt}


def turn(server: ServerProcess, caller: int, said: list[dict[str, str]]) -> dict[str, Any]:
    question = QUESTION.format(caller, len(said) // 2, caller * 7 + len(said))
    said.append({"role": "user", "content": question})
    reply = server.post("/v1/chat/completions", messages=said, max_tokens=16, seed=caller, ignore_eos=True)
    said.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return dict(reply["usage"])


def kill(folder: Path, times: int) -> dict[str, Any]:
    """SIGKILL to a replica while callers ask; again when it is back."""
    rounds = []
    with ServerProcess(folder, "--replicas", str(REPLICAS), "--health-check-period", "1") as server:
        for _ in range(times):
            rounds.append(_kill_once(server))
            print("kill", json.dumps(rounds[-1]))
        moved = server.metrics()["foretell:requests_moved_total"]
    return {"rounds": rounds, "moved": moved}


def _kill_once(server: ServerProcess) -> dict[str, Any]:
    before = living(server)
    with Load(server.url, callers=6, tokens=60) as load:
        wait_for(lambda: sum(load.outcomes.values()) >= 60)
        died = time.monotonic()
        os.kill(replica_pids(server.process.pid)[0], signal.SIGKILL)
        wait_for(lambda: len(now := living(server)) == REPLICAS and now != before, 90)
        back = time.monotonic() - died
        time.sleep(2)
    return {**outcomes(load, died), "seconds_until_back": round(back, 1)}


def update(folder: Path, times: int) -> dict[str, Any]:
    """`foretell deploy` with another setting while callers ask."""
    rounds = []
    with ServerProcess(folder, "--replicas", str(REPLICAS), "--health-check-period", "1") as server:
        address = re.findall(r"Ray at (\S+);", server.greeting)[0]
        for i in range(times):
            app = folder.parent / "app.yaml"
            app.write_text(
                f"model: {folder}\naddress: {address}\nport: {server.url.rsplit(':', 1)[1]}\nreplicas: {REPLICAS}\n"
                f"served_model_name: tiny\nthreads: 1\nmax_draft: {i + 1}\n"
            )
            rounds.append(_update_once(server, app))
            assert server.http.get("/server_info").json()["max_draft"] == i + 1
            print("update", json.dumps(rounds[-1]))
    return {"rounds": rounds}


def _update_once(server: ServerProcess, app: Path) -> dict[str, Any]:
    before = living(server)
    with Load(server.url, callers=6, tokens=60) as load:
        wait_for(lambda: sum(load.outcomes.values()) >= 60)
        began = time.monotonic()
        words = [sys.executable, "-m", "foretell", "deploy", str(app)]
        subprocess.run(words, check=True, capture_output=True, env=environment())
        took = time.monotonic() - began
        time.sleep(2)
    assert not set(before) & set(living(server)), "all were replaced"
    return {**outcomes(load, began), "seconds": round(took, 1)}


def living(server: ServerProcess) -> list[str]:
    return sorted(server.http.get("/health").json()["replicas"])


def outcomes(load: Load, since: float) -> dict[str, Any]:
    """What became of all requests, and the longest that one took which was asked around or after `since`."""
    longest = max(seconds for asked, seconds in load.times if asked + seconds > since)
    usual = median(seconds for asked, seconds in load.times if asked + seconds <= since)
    kept = {name: load.outcomes[name] for name in ("whole", "streamed", "cut", "broken", "failed")}
    return {**kept, "usual_s": round(usual, 3), "longest_s": round(longest, 2), "wrong": load.wrong[:3]}


def cost(folder: Path) -> dict[str, Any]:
    """One token, a stream of 200, and eight streams at once: a single server and replicas, the same requests."""
    arms = {"single": (), "1 replica": ("--replicas", "1"), f"{REPLICAS} replicas": ("--replicas", str(REPLICAS))}
    found = {}
    for name, flags in arms.items():
        with ServerProcess(folder, *flags) as server:
            for _ in range(20):
                one_token(server.http)
            found[name] = {
                "one_token_ms": round(1000 * median(_timed(lambda: one_token(server.http)) for _ in range(60)), 2),
                "stream_tokens_per_s": round(median(_stream(server.url) for _ in range(5))),
                "eight_streams_tokens_per_s": round(median(_streams(server.url, 8) for _ in range(3))),
            }
        print(f"{name:12}", json.dumps(found[name]))
    return found


def one_token(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "The quick brown fox", "max_tokens": 1}).raise_for_status()


def _timed(do: Callable[[], None]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _stream(url: str, tokens: int = 200) -> float:
    """Tokens per second of one stream, the wait for the first included; a chunk is a token without speculation."""
    body = {"prompt": "The quick brown fox", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body |= {"speculative": False}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        for _ in reply.iter_lines():
            pass
    return tokens / (time.perf_counter() - began)


def _streams(url: str, count: int, tokens: int = 200) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as callers:
        list(callers.map(lambda _: _stream(url, tokens), range(count)))
    return count * tokens / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=["routing", "kill", "update", "cost"])
    parser.add_argument("--times", type=int, default=3, help="kills and updates")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = write_server_folder(Path(place, "model"))
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "routing": lambda: routing(folder),
            "kill": lambda: kill(folder, args.times),
            "update": lambda: update(folder, args.times),
            "cost": lambda: cost(folder),
        }
        print(json.dumps({name: parts[name]() for name in args.what or parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
