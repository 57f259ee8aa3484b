"""What stands before the endpoints: keys, and limits on what callers may send."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .failures import Failure
from .halves import half_at
from .pages import is_page

OPEN = ("/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json")  # need no key
HERE = "localhost"

Tell = Callable[[Failure], Response]  # what a caller gets who is turned away; it is counted


class Keys:
    """The keys callers may show, known by their digests alone. Every comparison takes the same time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, shown: str) -> bool:
        """Whether a key is one of them; without any, everybody is let in."""
        mark = _digest(shown)
        matches = [hmac.compare_digest(mark, known) for known in self._digests]  # all of them, always
        return any(matches) or not self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def shown_key(scope: Scope) -> str:
    """The key in a request's Authorization header; empty where there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if kind.lower() == "bearer" else ""
    return ""


def is_open(path: str) -> bool:
    """Whether an address needs no key: it tells nothing of texts, and the page asks for the key itself."""
    return path in OPEN or is_page(path)


class KeyGuard:
    """Turns away who shows no key that fits."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], tell: Tell) -> None:
        self.app, self.keys, self.tell = app, Keys(keys), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]) or self.keys.admit(shown_key(scope)):
            await self.app(scope, receive, send)
            return
        words = "a key is needed: send it as Authorization: Bearer KEY"
        failure = Failure(401, words, "authentication_error", code="invalid_api_key")
        await self.tell(failure)(scope, receive, send)


class HostGuard:
    """Turns away who came here by a name that is not ours. A web page can have its own name lead to this machine, and
    would then be let in as if it came from here; the name it asks for gives it away."""

    def __init__(self, app: ASGIApp, names: Sequence[str], tell: Tell) -> None:
        self.app, self.names, self.tell = app, frozenset(name.lower() for name in names), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(asked_host(scope)):
            await self.app(scope, receive, send)
            return
        words = "this server answers to localhost alone; start it with --allowed-host NAME, or with an --api-key"
        await self.tell(Failure(403, words, "permission_error", code="host_not_allowed"))(scope, receive, send)

    def _knows(self, host: str | None) -> bool:
        return host is None or host in self.names or is_loopback(host)


def asked_host(scope: Scope) -> str | None:
    """The name a caller asked for, without its port; None where none was said, which browsers never do."""
    for name, value in scope["headers"]:
        if name == b"host":
            host = str(value.decode("latin-1").lower())
            return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == HERE or host.endswith("." + HERE)


class BodyGuard:
    """Stops bodies that are too large, before they are read, too slow, too many at once, or no text."""

    def __init__(self, app: ASGIApp, most: int, most_held: int, seconds: float, tell: Tell) -> None:
        """`most` bytes of one, `most_held` of all that are read or answered."""
        self.app, self.most, self.most_held, self.seconds, self.tell = app, most, most_held, seconds, tell
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            if not await self._read(scope, receive, body):
                return  # the caller went away
        except Failure as failure:
            await self.tell(failure)(scope, receive, send)
        else:
            await self.app(scope, _Replay(bytes(body), receive), send)
        finally:
            self.held -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """All of a body, into `body`; False where the caller went away."""
        if self._announced(scope) > self.most:
            raise self._too_large()
        deadline, more = asyncio.get_running_loop().time() + self.seconds, True
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Failure(408, f"the body took more than {self.seconds:g} seconds", code="body_timeout") from None
            if message["type"] == "http.disconnect":
                return False
            more = message.get("more_body", False)
            body += message.get("body", b"")
            self.held += len(message.get("body", b""))
            self._check_sizes(len(body))
        self._check_text(body)
        return True

    def _check_sizes(self, size: int) -> None:
        if size > self.most:
            raise self._too_large()
        if self.held > self.most_held:
            words = "too many large bodies are being answered; come back later"
            raise Failure(429, words, "rate_limit_error", code="bodies_full", headers={"Retry-After": "1"})

    def _check_text(self, body: bytearray) -> None:
        field = half_at(body)
        if field is not None:
            words = f"{field}: has half a surrogate pair; send valid Unicode"
            raise Failure(400, words, param=field, code="invalid_value")

    def _announced(self, scope: Scope) -> int:
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        return int(lengths[0]) if lengths and lengths[0].isdigit() else 0

    def _too_large(self) -> Failure:
        return Failure(413, f"the body has more than {self.most} bytes; send less", code="body_too_large")


class _Replay:
    """Gives a body that was read already, then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is None:
            return await self.receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}
