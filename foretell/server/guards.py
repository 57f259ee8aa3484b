"""What stands before the endpoints: keys, and limits on what callers may send."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .failures import Failure
from .pages import is_page

OPEN = ("/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json")  # need no key


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

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.keys = app, Keys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]) or self.keys.admit(shown_key(scope)):
            await self.app(scope, receive, send)
            return
        words = "a key is needed: send it as Authorization: Bearer KEY"
        failure = Failure(401, words, "authentication_error", code="invalid_api_key")
        await failure.response()(scope, receive, send)


class BodyGuard:
    """Stops bodies that are too large, before they are read, or too slow."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if self._announced(scope) > self.most:
                raise self._too_large()
            body = await self._read(receive)
        except Failure as failure:
            await failure.response()(scope, receive, send)
            return
        if body is not None:
            await self.app(scope, _Replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None where the caller went away."""
        parts, size, more = [], 0, True
        deadline = asyncio.get_running_loop().time() + self.seconds
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Failure(408, f"the body took more than {self.seconds:g} seconds", code="body_timeout") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self.most:
                raise self._too_large()
        return b"".join(parts)

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
