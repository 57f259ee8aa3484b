"""Delivery of deltas from the engine's thread to a connection: wake-ups, order and completeness."""

from __future__ import annotations

import asyncio
import json
import secrets
from functools import partial
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.engine.async_engine import AsyncEngine
from foretell.engine.streams import MAX_PENDING_CALLS, LoopCalls, StreamItem
from foretell.server.http_protocol import CONNECTION_KEY
from foretell.server.metrics import MAX_PENDING_REPORTS, Metrics
from foretell.server.openai.response_builder import OpenAIResponseBuilder
from foretell.server.service import Service
from foretell.server.sse import DONE, PLACEHOLDER, ChunkTemplate, sse_event
from tests.server.in_process import run_app as run_served
from tests.server.test_async_engine import alone, go, requests

HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {
    "messages": HELLO,
    "max_tokens": 12,
    "seed": 3,
    "temperature": 1.0,
    "ignore_eos": True,
    "speculative": False,
    "stream": True,
}


class Loop:
    """A loop that counts wake-ups and runs its calls on demand."""

    def __init__(self) -> None:
        self.woken = 0

    def call_soon_threadsafe(self, call: Any) -> None:
        self.woken += 1


def test_a_loop_is_woken_once_and_not_for_what_has_time() -> None:
    loop, made = Loop(), list[int]()
    calls = LoopCalls()
    calls.open(loop)  # type: ignore[arg-type]
    for number in range(3):
        calls.put(partial(made.append, number), urgent=False)
    assert loop.woken == 0
    for number in range(3, 6):
        calls.put(partial(made.append, number))
    assert loop.woken == 1
    calls.deliver()
    assert made == list(range(6))
    for number in range(MAX_PENDING_CALLS):
        assert loop.woken == 1
        calls.put(partial(made.append, number), urgent=False)
    assert loop.woken == 2, "in the end it is"


def test_a_call_that_fails_keeps_no_other_from_being_made() -> None:
    loop, made = Loop(), list[int]()
    calls = LoopCalls()
    calls.open(loop)  # type: ignore[arg-type]
    calls.put(partial(made.index, 7))  # type: ignore[arg-type]
    calls.put(partial(made.append, 1))
    with pytest.raises(ValueError, match="7"):
        calls.deliver()
    assert loop.woken == 2 and not made
    calls.deliver()
    assert made == [1]


def test_complete_responses_wake_the_loop_once_and_count_every_step() -> None:
    metrics, tokens = Metrics("m"), 2 * MAX_PENDING_CALLS

    async def play(engine: AsyncEngine) -> None:
        engine.observe = metrics.observe
        stream = engine.submit(requests(engine.engine, "a", tokens, n=2), wants_deltas=False)
        came = await stream.next_items()
        assert len({piece.delta.choice for piece in came if piece.delta.finish_reason}) == 2, "both have ended"
        first = [token for piece in came if piece.delta.choice == 0 for token in piece.delta.tokens]
        assert first == alone(tokens) and not await stream.next_items()
        assert metrics.totals.tokens == 2 * tokens

    go(play)


def test_catch_up_delivers_steps_that_did_not_wake_the_loop() -> None:
    metrics = Metrics("m")

    async def play(engine: AsyncEngine) -> None:
        engine.observe = metrics.observe
        stream = engine.submit(requests(engine.engine, "a", 200), wants_deltas=False)
        while (written := await engine.between_steps(lambda: engine.engine.stats.speculation.steps)) < 3:
            pass
        engine.deliver_pending()
        assert metrics.totals.tokens >= written
        stream.close()

    go(play)


def test_steps_are_counted_however_many_wait() -> None:
    for tokens in (MAX_PENDING_REPORTS - 1, 3 * MAX_PENDING_REPORTS):
        metrics = Metrics("m")

        async def play(engine: AsyncEngine, metrics: Metrics = metrics, tokens: int = tokens) -> None:
            engine.observe = metrics.observe
            asked = requests(engine.engine, "a", tokens)
            async for _ in engine.submit(asked).items():
                pass

        go(play)
        shown = counted(metrics)
        assert f'foretell:generation_tokens_total{{model_name="m"}} {tokens}.0' in shown
        assert counted(metrics) == shown, "nothing is counted twice"


def counted(metrics: Metrics) -> list[str]:
    """Return the exposed metrics without the process memory, which changes by itself."""
    return [line for line in metrics.expose("foretell").decode().splitlines() if "resident" not in line]


def test_a_failing_direct_write_fails_its_own_stream() -> None:
    async def play(engine: AsyncEngine) -> None:
        def take(piece: StreamItem) -> bool:
            raise ValueError("not this one")

        bad, good = (engine.submit(requests(engine.engine, name)) for name in "ab")
        bad.on_item = take
        with pytest.raises(ValueError, match="not this one"):
            async for _ in bad.items():
                pass
        assert [token async for piece in good.items() for token in piece.delta.tokens] == alone()

    go(play)


@pytest.mark.parametrize("words", ["word", ' "quoted"\n', "\0", "\u2028 é 火 \U0001f600", '\\u0000"'])
def test_a_chunk_template_equals_the_event(words: str) -> None:
    def chunk(content: str) -> dict[str, Any]:
        return {"id": PLACEHOLDER, "model": "\0 é", "choices": [{"delta": {"content": content}, "finish_reason": None}]}

    assert ChunkTemplate(chunk(PLACEHOLDER)).event(words) == sse_event(chunk(words))


class Line:
    """A connection whose buffer is sometimes full; it records what is written."""

    def __init__(self) -> None:
        self.asked, self.parts = 0, list[bytes]()

    def can_write(self) -> bool:
        self.asked += 1
        return self.asked % 4 != 0

    def write(self, part: bytes) -> None:
        self.parts.append(part)


async def stream_of(app: Any, body: dict[str, Any], line: Line | None) -> list[bytes]:
    """Return what is sent, in order, to the connection or through ASGI."""
    parts = [] if line is None else line.parts
    asked = {**ASKED, **body, "cache_salt": secrets.token_hex(8)}  # no prefix cache hits
    received = [{"type": "http.request", "body": json.dumps(asked).encode()}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {} if line is None else {CONNECTION_KEY: line},
    }
    await app(scope, receive, send)
    return parts


def pace(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay each step until the loop has delivered the last one."""
    step, loop = assembly.engine.step, asyncio.get_running_loop()

    async def turns() -> None:
        for _ in range(50):  # far more than words take from task to task
            await asyncio.sleep(0)

    def paced() -> Any:
        asyncio.run_coroutine_threadsafe(turns(), loop).result()
        return step()

    monkeypatch.setattr(assembly.engine, "step", paced)


def parse_chunks(parts: list[bytes]) -> list[dict[str, Any]]:
    """Return the chunks of a stream grouped by choice, without fields that differ each time."""
    whole = b"".join(parts)
    assert whole.endswith(DONE)
    chunks = [json.loads(line.removeprefix("data: ")) for line in whole[: -len(DONE)].decode().split("\n\n") if line]
    chunks.sort(key=lambda chunk: [choice["index"] for choice in chunk["choices"]] or [len(chunks)])
    return [{name: chunk.get(name) for name in ("choices", "usage", "object", "model")} for chunk in chunks]


BODIES: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_origin": True},
    {"chat_template_kwargs": {"think": True}},
    {"n": 2},
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: " ".join(body) or "plain")
def test_direct_writes_equal_the_stream(
    assembly: Assembly, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        pace(assembly, monkeypatch)
        app, line = client._transport.app, Line()  # type: ignore[attr-defined]
        usual = await stream_of(app, body, None)
        direct = await stream_of(app, body, line)
        assert parse_chunks(direct) == parse_chunks(usual)
        assert bool(line.asked) == ("n" not in body), "one text goes the short way, several are sent together"

    run_served(assembly, play)


def test_a_failing_direct_write_is_reported_in_the_stream(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    written = OpenAIResponseBuilder.events

    def events(reply: OpenAIResponseBuilder, piece: StreamItem) -> bytes:
        if len(reply.choices[0].tokens) > 4:
            raise ValueError("a fault")
        return written(reply, piece)

    monkeypatch.setattr(OpenAIResponseBuilder, "events", events)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        pace(assembly, monkeypatch)
        parts = await stream_of(client._transport.app, {}, Line())  # type: ignore[attr-defined]
        lines = b"".join(parts).decode().split("\n\n")
        assert "error" in json.loads(lines[-3].removeprefix("data: ")) and lines[-2] == "data: [DONE]"
        while service.engine.num_sequences:
            await asyncio.sleep(0.01)

    run_served(assembly, play)
