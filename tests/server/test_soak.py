"""Soak test: the server survives mixed load, and no output depends on other requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * 2, "She sells sea shells by the sea shore. ", "fox " * 9]
GRAMMARS: list[dict[str, Any]] = [
    {"guided_choice": ["left", "right", "straight on"]},
    {"guided_regex": "[a-z]{4,30}"},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]
FLAGS = {  # pages for two or three of the ten sequences that may run
    "--max-model-len": "192",
    "--max-num-seqs": "10",
    "--max-num-batched-tokens": "64",
    "--page-size": "4",
    "--kv-memory": "0.00005",
    "--max-queue": "400",
    "--drafter": "ngram,suffix",
}
CLIENTS, PALETTE = 24, 24


def palette(rng: random.Random) -> list[dict[str, Any]]:
    """Seeded requests, whose outputs must not depend on timing."""
    return [_request(rng, i) for i in range(PALETTE)]


def _request(rng: random.Random, seed: int) -> dict[str, Any]:
    text = rng.choice(PROMPTS) + str(seed)
    body: dict[str, Any] = {
        **({"messages": [{"role": "user", "content": text}]} if rng.random() < 0.3 else {"prompt": text}),
        "seed": seed,
        "max_tokens": rng.choice((1, 8, 20, 60, 110)),
        "temperature": rng.choice((0, 0.7, 1.0)),
    }
    if rng.random() < 0.3:
        body |= rng.choice(GRAMMARS)
    elif rng.random() < 0.4:
        body |= {"stop": rng.sample(["e", "o", " th", "shell", "\n"], 2), "ignore_eos": True}
    if rng.random() < 0.2:
        body |= {"n": 2}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "min_tokens": 3, "max_tokens": max(8, body["max_tokens"])}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
    if rng.random() < 0.2:
        body["speculative"] = rng.choice((False, {"drafter": "ngram"}, {"max_draft": 2}))
    return body


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice or delta; of a chat, with its reasoning."""
    if "text" in choice:
        return str(choice["text"])
    said = choice.get("message") or choice["delta"]
    return str(said.get("content") or "")


class Soak:
    """Many concurrent clients that sometimes disconnect early."""

    def __init__(self, server: ServerProcess, count: int) -> None:
        self.rng = random.Random(1)
        self.server, self.count = server, count
        self.requests = palette(self.rng)
        self.said: dict[int, Counter[str]] = {i: Counter() for i in range(PALETTE)}
        self.outcomes: Counter[str] = Counter()
        self.stopped = 0  # outputs that a stop string ended
        self.fullest = 0.0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CLIENTS + 2)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as client:
            watching = asyncio.ensure_future(self._watch(client))
            turns = iter(range(self.count))
            await asyncio.gather(*(self._client(client, turns) for _ in range(CLIENTS)))
            watching.cancel()

    async def _client(self, client: httpx.AsyncClient, turns: Any) -> None:
        for _ in turns:
            await asyncio.sleep(self.rng.expovariate(300))
            which, way = self.rng.randrange(PALETTE), self.rng.random()
            body = self.requests[which]
            if way < 0.1:
                await self._leave_early(client, body)
            elif way < 0.2:
                await self._leave_waiting(client, body)
            elif way < 0.6:
                async with streamed(client, body) as events:
                    self.said[which][await self._collect(events, body)] += 1
                self.outcomes["streamed"] += 1
            else:
                reply = await client.post(path_of(body), json=body)
                assert reply.status_code == 200, reply.text
                self._count(body, reply.json()["choices"])
                self.said[which][texts_of(reply.json())] += 1
                self.outcomes["whole"] += 1

    async def _collect(self, events: AsyncIterator[dict[str, Any]], body: dict[str, Any]) -> str:
        outputs, ended = [""] * body.get("n", 1), 0
        async for event in events:
            assert "error" not in event, event
            for choice in event["choices"]:
                outputs[choice["index"]] += text_of(choice)
                ended += choice["finish_reason"] is not None
            self._count(body, event["choices"])
        assert ended == len(outputs), "every choice has its end"
        return json.dumps(outputs)

    def _count(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        """Requests with stop strings ignore EOS."""
        self.stopped += sum("stop" in body and choice["finish_reason"] == "stop" for choice in choices)

    async def _leave_early(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with streamed(client, body) as events:
            async for _ in events:
                if self.rng.random() < 0.5:
                    break
        self.outcomes["left"] += 1

    async def _leave_waiting(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        with suppress(httpx.TimeoutException):
            await client.post(path_of(body), json=body, timeout=self.rng.uniform(0.005, 0.1))
        self.outcomes["left"] += 1

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            text = (await client.get("/metrics")).text
            line = next(line for line in text.splitlines() if line.startswith("foretell:kv_cache_usage_perc"))
            self.fullest = max(self.fullest, float(line.rsplit(" ", 1)[1]))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])

    async with client.stream("POST", path_of(body), json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        yield events(reply)


def texts_of(reply: dict[str, Any]) -> str:
    return json.dumps([text_of(choice) for choice in reply["choices"]])


def soak(folder: Path, count: int) -> None:
    with ServerProcess(folder, *(word for pair in FLAGS.items() for word in pair)) as server:
        trial = Soak(server, count)
        asyncio.run(trial.run())
        assert sum(trial.outcomes.values()) == count, "every request has an outcome"
        assert trial.stopped > count / 40, "stop strings were met"
        assert {path_of(body) for body in trial.requests} == {"/v1/chat/completions", "/v1/completions"}
        for which, body in enumerate(trial.requests):
            alone = texts_of(server.post(path_of(body), **{**body, "speculative": False}))
            assert set(trial.said[which]) <= {alone}, body
        found = server.metrics()
        assert found["foretell:num_requests_running"] == found["foretell:num_requests_waiting"] == 0
        assert found["foretell:kv_cache_usage_perc"] == 0, "all pages are back"
        assert found["foretell:num_preemptions_total"] > 0 and trial.fullest > 0.95
        assert not any(name.startswith("foretell:request_failures") for name in found)
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def test_a_short_soak(folder: Path) -> None:
    soak(folder, 200)


@pytest.mark.slow
def test_ten_thousand_requests(folder: Path) -> None:
    soak(folder, 10_000)
