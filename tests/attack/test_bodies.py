"""Hostile request bodies on every endpoint: refused with a 4xx and in bounded memory; the server stays healthy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from foretell.server.dialects import dialect_of
from foretell.server.middleware import BODY_PATHS, BodyLimitMiddleware
from tests.server.process import ServerProcess, write_server_folder

KEY = "a-key"
OPEN = ("/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json", "/", "/page/main.js")
KEYED = ("/v1/models", "/v1/models/tiny", "/server_info", "/nowhere")
MOST_GROWTH = 256 << 20  # bytes of resident memory; the first bomb took 1.7 GB where each list entry had its path
SIZE = 200_000  # bytes of a bomb
STATUS = Path("/proc/self/status")


def repeated(unit: bytes) -> bytes:
    return b"[" + b",".join([unit] * (SIZE // (len(unit) + 1))) + b"]"


BOMBS = {
    "long paths": b'{"s":"\\ud83d\\ude00","' + b"k" * 20_000 + b'":[' + b",".join([b"0"] * 100_000) + b"]}",
    "empty lists": b'{"prompt":"a","metadata":' + repeated(b"[]") + b"}",
    "small objects": b'{"prompt":"a","metadata":' + repeated(b'{"":{"":0}}') + b"}",
    "many fields": json.dumps({f"{i:x}": i for i in range(20_000)}).encode(),
    "prompts": b'{"prompt":' + repeated(b"[1]") + b"}",
    "messages": b'{"messages":' + repeated(b'{"role":"user","content":[]}') + b"}",
    "token ids": b'{"tokens":' + repeated(b"1") + b"}",
    "digits": b'{"prompt":"' + b"1" * SIZE + b'"}',
    "surrogates": b'{"prompt":"' + b"\\ud83d\\ude00" * (SIZE // 12) + b'\\ud83d"}',
    "backslashes": b'{"prompt":"' + b"\\\\" * (SIZE // 2) + b'\\ud800"}',
    "nested lists": b"[" * SIZE,
    "nested objects": b'{"a":' * (SIZE // 5),
    "closed lists": b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a long number": b'{"prompt":"a","seed":' + b"9" * SIZE + b"}",
    "no JSON": b"\xff\xfe\x00" * (SIZE // 3),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key."""
    folder = write_server_folder(tmp_path_factory.mktemp("models") / "server")
    with ServerProcess(folder, "--api-key", KEY, "--drafter", "none", "--max-body-bytes", "400000") as process:
        yield process


def peak_memory(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM")]
    return int(peak.split()[1]) * 1024


def send(server: ServerProcess, method: str, path: str, body: bytes, key: str | None = None) -> httpx.Response:
    headers = {"content-type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return server.http.request(method, path, content=body, headers=headers)


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_takes_little_memory_on_any_endpoint(server: ServerProcess, bomb: str) -> None:
    body, before = BOMBS[bomb], peak_memory(server)
    everywhere = bomb == "long paths"
    for path in OPEN if everywhere else OPEN[:1]:
        for method in ("GET", "HEAD"):
            assert send(server, method, path, body).status_code == 400, path
        assert send(server, "POST", path, body).status_code in (401, 404, 405), path
    for path in (*(KEYED if everywhere else ()), *BODY_PATHS):
        assert send(server, "GET", path, body).status_code == 401
        # GET takes "input_tokens" for the id of a stored response.
        refused = 404 if path == "/v1/responses/input_tokens" else 405 if path in BODY_PATHS else 400
        assert send(server, "GET", path, body, KEY).status_code == refused, path
        assert send(server, "POST", path, body).status_code == 401
        expected = (200, 400) if path in BODY_PATHS else (404, 405)
        assert send(server, "POST", path, body, KEY).status_code in expected, path
    assert server.http.get("/health").status_code == 200
    assert peak_memory(server) - before < MOST_GROWTH


def test_a_refused_get_body_closes_the_connection(server: ServerProcess) -> None:
    reply = send(server, "GET", "/health", b"{}")
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "unexpected_body"
    assert reply.headers["connection"] == "close" and "without one" in reply.json()["error"]["message"]
    assert server.http.get("/health", headers={"content-length": "0"}).status_code == 200


@pytest.mark.parametrize("path", BODY_PATHS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le", "utf-8-sig"])
def test_encodings(server: ServerProcess, path: str, encoding: str) -> None:
    body = '{"prompt": "ab", "tokens": [1], "messages": [], "cache_salt": "\\ud800"}'
    reply = send(server, "POST", path, body.encode(encoding), KEY)
    assert reply.status_code == 400 and "not JSON" in json.dumps(reply.json()["error"]), reply.text


HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION = {"messages": HELLO, "max_tokens": 1}, {"prompt": "a", "max_tokens": 1}
NESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "metadata": ("/v1/completions", COMPLETION),
    "guided_json": ("/v1/completions", COMPLETION),
    "prompt": ("/v1/completions", {}),
    "logit_bias": ("/v1/completions", COMPLETION),
    "chat_template_kwargs": ("/v1/chat/completions", CHAT),
    "messages": ("/v1/chat/completions", {}),
    "tools": ("/v1/chat/completions", CHAT),
    "response_format": ("/v1/chat/completions", CHAT),
    "tokens": ("/detokenize", {}),
}


@pytest.mark.parametrize("field", NESTED)
@pytest.mark.parametrize("depth", [150, 900, 50_000])
def test_deep_nesting_is_never_a_server_error(server: ServerProcess, field: str, depth: int) -> None:
    path, rest = NESTED[field]
    value = '{"a":' * depth + "0" + "}" * depth
    body = json.dumps({**rest, field: "HERE"}).replace('"HERE"', value).encode()
    reply = send(server, "POST", path, body, KEY)
    assert reply.status_code in ((200, 400) if depth < 200 else (400,)), reply.text
    assert depth < 200 or "recursion" in reply.json()["error"]["message"]


@pytest.mark.parametrize("depth", [150, 20_000])
def test_deep_nesting_inside_a_string_is_never_a_server_error(server: ServerProcess, depth: int) -> None:
    """JSON in a string gets past the depth limit of the body."""
    text = '{"a":' * depth + "0" + "}" * depth
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    chat = json.dumps({**CHAT, "messages": [*HELLO, call]}).encode()
    assert send(server, "POST", "/v1/chat/completions", chat, KEY).status_code in (200, 400)
    guided = json.dumps({**COMPLETION, "guided_json": text}).encode()
    assert send(server, "POST", "/v1/completions", guided, KEY).status_code in (200, 400)


def test_memory_of_parsed_bodies_is_bounded_in_sum() -> None:
    """Bodies that take 30 times their size when parsed are refused long before their raw bytes reach the limit."""
    body = b"[" + b",".join([b"{}"] * 10_000) + b"]"
    most = 100 * len(body)
    release, statuses, entered = asyncio.Event(), [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered.append(guard.held_bytes)
        await release.wait()

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def call() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
        await guard(scope, receive, send)

    guard = BodyLimitMiddleware(app, len(body), most, 60, lambda error, path: dialect_of(path).response(error))

    async def scene() -> None:
        calls = [asyncio.ensure_future(call()) for _ in range(50)]
        while len(statuses) + len(entered) < len(calls):
            await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*calls)

    asyncio.run(scene())
    assert 1 < len(entered) < 10 and set(statuses) == {429}, "the raw bytes of all fifty would have fitted"
    assert max(entered) <= most and guard.held_bytes == 0
