"""HTTP clients for load tests: streamed requests with their times, and closed-loop and Poisson arrivals.

Uses the standard library only.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from foretell.errors import RequestError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TIMEOUT = 600.0  # seconds for one request
MAX_LINE_BYTES = 1 << 22
DATA, DONE = b"data:", b"[DONE]"
TEXT_FIELDS = ("content", "reasoning_content")
EXTRA_FIELDS = ("timings", "metrics", "speculation")  # fields in which llama.cpp, vLLM and Foretell report on a request


@dataclass(frozen=True)
class Address:
    """Address of a server and its API key."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Address:
        """Parse http://host:port, with or without the /v1 that clients add."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError("base_url", f"{url!r} is not an address; write it as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, key)

    def post_request(self, body: Mapping[str, Any]) -> bytes:
        """Return the HTTP request of a chat, or of a completion if the body has a prompt."""
        content = json.dumps(body).encode()
        path = COMPLETION if "prompt" in body else CHAT
        return self._head(f"POST {self.path}{path}", f"Content-Length: {len(content)}") + content

    def get_request(self, path: str) -> bytes:
        """Return the HTTP request for a page."""
        return self._head(f"GET {self.path}{path}")

    def _head(self, what: str, *more: str) -> bytes:
        lines = [
            f"{what} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            *more,
            "Connection: close",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True)
class StreamResult:
    """The result of one streamed request. Times are seconds since it was sent."""

    tokens: int = 0
    first: float | None = None  # time to first token
    last: float = 0.0
    error: str | None = None
    text: str = field(default="", compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)  # EXTRA_FIELDS of the stream
    request_key: str = field(default="", compare=False)  # equal requests have equal keys

    @property
    def seconds_per_token(self) -> float | None:
        """Return the time per token after the first; None for a failed or too short request."""
        if self.error is not None or self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class ServerError(Exception):
    """An error that the server returned."""


UNREACHABLE = (OSError, EOFError)  # no connection, a closed one, or a timeout
NOT_HTTP = (ServerError, ValueError, asyncio.LimitOverrunError)  # a response that is not valid HTTP
FAILURES = (*UNREACHABLE, *NOT_HTTP)


def suggestion(error: str) -> str:
    """Return what to do about the error of a first request."""
    if error.startswith(("HTTP 401", "HTTP 403")):
        return "give its key with --api-key"
    if error.startswith("HTTP "):
        return "request what it serves, or name another server"
    return "start the server, or correct the address"


async def stream_request(
    address: Address,
    body: Mapping[str, Any],
    timeout: float = TIMEOUT,
    clock: Callable[[], float] = perf_counter,
) -> StreamResult:
    """Send a request and read its stream to the end; a failure is a result with an error."""
    began = clock()
    tokens, first, last = 0, None, 0.0
    pieces: list[str] = []
    extra: dict[str, Any] = {}
    try:
        async with asyncio.timeout(timeout), aclosing(_events(address, address.post_request(body))) as events:
            async for event in events:
                if "error" in event:
                    raise ServerError(_error_message(event["error"]))
                if _has_output(event):
                    last = clock() - began
                    first = last if first is None else first
                    pieces.append(_text(event))
                extra |= {name: event[name] for name in EXTRA_FIELDS if event.get(name)}
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except TimeoutError:
        return StreamResult(tokens, first, last, f"no response within {timeout:g} s")
    except FAILURES as error:
        return StreamResult(tokens, first, last, _one_line(error))
    return StreamResult(tokens, first, last or clock() - began, None, "".join(pieces), extra)


async def get_page(address: Address, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """Return the status and the body of a page."""
    async with asyncio.timeout(timeout):
        reader, writer = await _connect(address)
        try:
            writer.write(address.get_request(path))
            status, body = await _reply(reader)
            return status, b"".join([part async for part in body])
        finally:
            writer.close()


async def _events(address: Address, request: bytes) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the server-sent events of a response up to [DONE]."""
    reader, writer = await _connect(address)
    try:
        writer.write(request)
        status, body = await _reply(reader)
        if status != 200:
            raise ServerError(f"HTTP {status}: {_error_message(b''.join([part async for part in body]))}")
        async for line in _lines(body):
            if not line.startswith(DATA):
                continue
            data = line[len(DATA) :].strip()
            if data == DONE:
                return
            yield json.loads(data)
        raise ServerError("the stream ended early")
    finally:
        writer.close()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address.host, address.port, ssl=address.tls or None, limit=MAX_LINE_BYTES)


async def _reply(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """Return the status, and the body as a stream."""
    status, headers = await _head(reader)
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    return status, _chunks(reader) if chunked else _rest(reader, headers.get("content-length"))


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[1].isdigit():
        raise ServerError(f"not HTTP: {lines[0][:80]!r}")
    pairs = [line.partition(":") for line in lines[1:] if line]
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader, length: str | None) -> AsyncIterator[bytes]:
    """Yield `length` bytes, or all until the connection closes."""
    if length is not None:
        yield await reader.readexactly(int(length))
        return
    while part := await reader.read(1 << 16):
        yield part


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream of chunks into lines."""
    rest = b""
    async for part in parts:
        *complete, rest = (rest + part).split(b"\n")
        for line in complete:
            yield line


def _has_output(event: Mapping[str, Any]) -> bool:
    """Return whether an event has text, reasoning or a tool call; the role alone is none."""
    return any(
        choice.get("text") or any((choice.get("delta") or {}).get(name) for name in (*TEXT_FIELDS, "tool_calls"))
        for choice in event.get("choices") or ()
    )


def _text(event: Mapping[str, Any]) -> str:
    """Return the text of an event, reasoning included."""
    deltas = [(choice, choice.get("delta") or {}) for choice in event["choices"]]
    return "".join(
        (choice.get("text") or "") + "".join(delta.get(name) or "" for name in TEXT_FIELDS) for choice, delta in deltas
    )


def _error_message(found: Any) -> str:
    """Return the message of an error in any of the usual shapes."""
    if isinstance(found, bytes):
        try:
            found = json.loads(found)
        except ValueError:
            found = found.decode("utf-8", "replace")
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or json.dumps(found)
    return str(found)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


Send = Callable[[Mapping[str, Any]], Awaitable[StreamResult]]
RETRY_DELAY = 0.2  # seconds before a client retries after an error


@dataclass(frozen=True)
class ClosedLoop:
    """Closed-loop load: each client sends its next request after the response to the last."""

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise RequestError("concurrency", f"must be 1 or more, not {self.clients}")

    def __str__(self) -> str:
        return f"{self.clients} at once"

    async def run(
        self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str
    ) -> list[StreamResult]:
        """Send requests for `seconds` and wait for all responses."""
        results: list[StreamResult] = []
        end = perf_counter() + seconds

        async def client() -> None:
            while perf_counter() < end:
                results.append(await send(next(bodies)))
                if results[-1].error is not None:
                    await asyncio.sleep(RETRY_DELAY)

        await asyncio.gather(*(client() for _ in range(self.clients)))
        return results


@dataclass(frozen=True)
class Poisson:
    """Open-loop load: Poisson arrivals at `rate` requests per second."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise RequestError("rate", f"must be above 0, not {self.rate}")

    def __str__(self) -> str:
        return f"{self.rate:g} a second"

    def times(self, seconds: float, seed: str) -> list[float]:
        """Return the arrival times, the same for every variant."""
        rng, at = random.Random(seed), 0.0
        found: list[float] = []
        while (at := at + rng.expovariate(self.rate)) < seconds:
            found.append(at)
        return found

    async def run(
        self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str
    ) -> list[StreamResult]:
        """Send requests for `seconds` and wait for all responses."""
        began = perf_counter()
        tasks: list[asyncio.Task[StreamResult]] = []
        async with asyncio.TaskGroup() as group:
            for at in self.times(seconds, seed):
                await asyncio.sleep(max(0.0, began + at - perf_counter()))
                tasks.append(group.create_task(_as_task(send, next(bodies))))
        return [task.result() for task in tasks]


Level = ClosedLoop | Poisson


async def _as_task(send: Send, body: Mapping[str, Any]) -> StreamResult:
    return await send(body)
