"""A caller of a server: one text as a stream over HTTP, and when its words came. Nothing but the standard library."""

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
PATIENCE = 600.0  # seconds for one answer
LONGEST_LINE = 1 << 22
DATA, DONE = b"data:", b"[DONE]"
SPOKEN = ("content", "reasoning_content")
TOLD = ("timings", "metrics", "speculation")  # what llama.cpp, vLLM and we say of a text


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the key it wants."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Address:
        """Of http://host:port, with or without the /v1 that clients add."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError("base_url", f"{url!r} is no address such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, key)

    def request(self, body: Mapping[str, Any]) -> bytes:
        """A chat as it goes over the wire, or a text to be continued where it has a prompt."""
        content = json.dumps(body).encode()
        path = COMPLETION if "prompt" in body else CHAT
        return self._head(f"POST {self.path}{path}", f"Content-Length: {len(content)}") + content

    def look(self, path: str) -> bytes:
        """Asks for a page."""
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
class Answer:
    """How one request went. Times are seconds since it was sent."""

    tokens: int = 0
    first: float | None = None  # when the first words came
    last: float = 0.0
    error: str | None = None
    text: str = field(default="", compare=False)
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of itself, beside text and usage
    key: str = field(default="", compare=False)  # what was asked: who asks the same gets the same text

    @property
    def a_token(self) -> float | None:
        """Seconds for a token behind the first words."""
        if self.error is not None or self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class Refused(Exception):
    """The server's answer is an error; the words say which."""


SILENT = (OSError, EOFError)  # nobody listens, or goes before an answer has come; one who takes too long as well
GARBLED = (Refused, ValueError, asyncio.LimitOverrunError)  # whoever listens does not speak HTTP
FAILURES = (*SILENT, *GARBLED)


def remedy(error: str) -> str:
    """What would do where a first request failed with these words."""
    if error.startswith(("HTTP 401", "HTTP 403")):
        return "--api-key gives the key it wants"
    if error.startswith("HTTP "):
        return "ask for what it serves, or name another server"
    return "start the server, or mend the address"


async def ask(
    address: Address,
    body: Mapping[str, Any],
    patience: float = PATIENCE,
    clock: Callable[[], float] = perf_counter,
) -> Answer:
    """Send a chat and read its stream to the end. Whatever goes wrong is an answer too."""
    began = clock()
    tokens, first, last = 0, None, 0.0
    words: list[str] = []
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(patience), aclosing(_events(address, address.request(body))) as events:
            async for event in events:
                if "error" in event:
                    raise Refused(_words(event["error"]))
                if _says_something(event):
                    last = clock() - began
                    first = last if first is None else first
                    words.append(_text(event))
                told |= {name: event[name] for name in TOLD if event.get(name)}
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except TimeoutError:
        return Answer(tokens, first, last, f"no answer within {patience:g} s")
    except FAILURES as error:
        return Answer(tokens, first, last, _one_line(error))
    return Answer(tokens, first, last or clock() - began, None, "".join(words), told)


async def look(address: Address, path: str, patience: float = 10.0) -> tuple[int, bytes]:
    """The status and the body of a page."""
    async with asyncio.timeout(patience):
        reader, writer = await _connect(address)
        try:
            writer.write(address.look(path))
            status, body = await _reply(reader)
            return status, b"".join([part async for part in body])
        finally:
            writer.close()


async def _events(address: Address, request: bytes) -> AsyncGenerator[dict[str, Any], None]:
    """The events of an answer, up to the one that says it is whole."""
    reader, writer = await _connect(address)
    try:
        writer.write(request)
        status, body = await _reply(reader)
        if status != 200:
            raise Refused(f"HTTP {status}: {_words(b''.join([part async for part in body]))}")
        async for line in _lines(body):
            if not line.startswith(DATA):
                continue
            data = line[len(DATA) :].strip()
            if data == DONE:
                return
            yield json.loads(data)
        raise Refused("the stream broke off")
    finally:
        writer.close()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address.host, address.port, ssl=address.tls or None, limit=LONGEST_LINE)


async def _reply(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """The status, and the body as it comes."""
    status, headers = await _head(reader)
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    return status, _chunks(reader) if chunked else _rest(reader, headers.get("content-length"))


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[1].isdigit():
        raise Refused(f"no HTTP: {lines[0][:80]!r}")
    pairs = [line.partition(":") for line in lines[1:] if line]
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader, length: str | None) -> AsyncIterator[bytes]:
    """So many bytes, or where nobody says how many all there are."""
    if length is not None:
        yield await reader.readexactly(int(length))
        return
    while part := await reader.read(1 << 16):
        yield part


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines, however they were cut on the way."""
    left = b""
    async for part in parts:
        *whole, left = (left + part).split(b"\n")
        for line in whole:
            yield line


def _says_something(event: Mapping[str, Any]) -> bool:
    """Words or thoughts; the role alone is none."""
    return any(
        choice.get("text") or any((choice.get("delta") or {}).get(name) for name in (*SPOKEN, "tool_calls"))
        for choice in event.get("choices") or ()
    )


def _text(event: Mapping[str, Any]) -> str:
    """The words of an event, thoughts included."""
    deltas = [(choice, choice.get("delta") or {}) for choice in event["choices"]]
    return "".join(
        (choice.get("text") or "") + "".join(delta.get(name) or "" for name in SPOKEN) for choice, delta in deltas
    )


def _words(found: Any) -> str:
    """What an error says, whatever its form."""
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


Send = Callable[[Mapping[str, Any]], Awaitable[Answer]]
BREATH = 0.2  # seconds before one who met an error tries again


@dataclass(frozen=True)
class ClosedLoop:
    """So many callers, each of whom asks again when answered."""

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise RequestError("concurrency", f"must be 1 or more, not {self.clients}")

    def __str__(self) -> str:
        return f"{self.clients} at once"

    async def run(self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str) -> list[Answer]:
        """Ask for so long; what was asked until then is answered."""
        answers: list[Answer] = []
        end = perf_counter() + seconds

        async def client() -> None:
            while perf_counter() < end:
                answers.append(await send(next(bodies)))
                if answers[-1].error is not None:
                    await asyncio.sleep(BREATH)

        await asyncio.gather(*(client() for _ in range(self.clients)))
        return answers


@dataclass(frozen=True)
class Poisson:
    """Callers who know nothing of each other, so many a second on average."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise RequestError("rate", f"must be above 0, not {self.rate}")

    def __str__(self) -> str:
        return f"{self.rate:g} a second"

    def times(self, seconds: float, seed: str) -> list[float]:
        """When they come; the same for every arm."""
        rng, at = random.Random(seed), 0.0
        found: list[float] = []
        while (at := at + rng.expovariate(self.rate)) < seconds:
            found.append(at)
        return found

    async def run(self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str) -> list[Answer]:
        """Let them come for so long; all of them are answered."""
        began = perf_counter()
        asked: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as group:
            for at in self.times(seconds, seed):
                await asyncio.sleep(max(0.0, began + at - perf_counter()))
                asked.append(group.create_task(_as_task(send, next(bodies))))
        return [task.result() for task in asked]


Level = ClosedLoop | Poisson


async def _as_task(send: Send, body: Mapping[str, Any]) -> Answer:
    return await send(body)
