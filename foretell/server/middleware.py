"""The middleware of a server: what a request passes before it reaches an endpoint, or a replica."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence

from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.server.config import ServerConfig
from foretell.server.errors import ApiError
from foretell.server.json_body import parsed_bytes
from foretell.server.routes.playground import is_page

PUBLIC_PATHS = (
    "/health",
    "/ready",
    "/metrics",
    "/metrics/replicas",
    "/version",
    "/docs",
    "/openapi.json",
)  # need no key
BODY_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")  # a POST there has a body
HERE = "localhost"
HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")  # and a port
CLOSE = {"Connection": "close"}

ErrorResponder = Callable[[ApiError], Response]  # what a caller gets who is turned away; it is counted


class ApiKeys:
    """The keys callers may show, known by their digests alone. Every comparison takes the same time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, shown: str) -> bool:
        """Whether a key is one of them; without any, everybody is let in."""
        mark = _digest(shown)
        matches = [hmac.compare_digest(mark, known) for known in self._digests]  # all of them, always
        return any(matches) or not self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def bearer_key(scope: Scope) -> str:
    """Return the key of a request's Authorization header; empty where there is none.

    Clients send keys beyond ASCII in UTF-8, a few in Latin-1, in which every byte string can be decoded.
    """
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = _decode(value).partition(" ")
            return key.strip() if kind.lower() == "bearer" else ""
    return ""


def _decode(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def is_public(path: str) -> bool:
    """Whether an address needs no key: it tells nothing of texts, and the page asks for the key itself."""
    return path in PUBLIC_PATHS or is_page(path)


class ApiKeyMiddleware:
    """Turns away who shows no key that fits."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], tell: ErrorResponder) -> None:
        self.app, self.keys, self.respond = app, ApiKeys(keys), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope["path"]) or self.keys.accepts(bearer_key(scope)):
            await self.app(scope, receive, send)
            return
        words = "a key is needed: send it as Authorization: Bearer KEY"
        failure = ApiError(401, words, "authentication_error", code="invalid_api_key")
        await self.respond(failure)(scope, receive, send)


class HostMiddleware:
    """Turns away who came here by a name that is not ours. A web page can have its own name lead to this machine, and
    would then be let in as if it came from here; the name it asks for gives it away."""

    def __init__(self, app: ASGIApp, names: Sequence[str], tell: ErrorResponder) -> None:
        self.app, self.names, self.respond = app, frozenset(name.lower() for name in names), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(requested_host(scope)):
            await self.app(scope, receive, send)
            return
        words = "this server answers to localhost alone; start it with --allowed-host NAME, or with an --api-key"
        await self.respond(ApiError(403, words, "permission_error", code="host_not_allowed"))(scope, receive, send)

    def _knows(self, host: str | None) -> bool:
        return host is None or host in self.names or is_loopback(host)


def requested_host(scope: Scope) -> str | None:
    """Return the host of the Host header without its port: None where there is no header, "" for a malformed one."""
    for name, value in scope["headers"]:
        if name == b"host":
            host = HOST.fullmatch(value.decode("latin-1").lower())
            return "" if host is None else host["v6"] or host["name"] or ""
    return None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == HERE or host.endswith("." + HERE)


class FramingMiddleware:
    """Refuses requests with both Content-Length and Transfer-Encoding, and closes the connection.

    The HTTP parser goes by one of them. A proxy that goes by the other takes part of the body for the next request
    (request smuggling).
    """

    def __init__(self, app: ASGIApp, tell: ErrorResponder) -> None:
        self.app, self.respond = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if scope["type"] != "http" or not names >= {b"content-length", b"transfer-encoding"}:
            await self.app(scope, receive, send)
            return
        words = "send Content-Length or Transfer-Encoding, not both"
        await self.respond(ApiError(400, words, code="ambiguous_length", headers=CLOSE))(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies that are too large, too slow or too many for memory, and bodies where none belongs."""

    def __init__(self, app: ASGIApp, most: int, most_held: int, seconds: float, tell: ErrorResponder) -> None:
        """`most` bytes of one body; `most_held` bytes of all bodies that are held, raw and parsed."""
        self.app, self.max_bytes, self.max_held_bytes, self.timeout, self.respond = app, most, most_held, seconds, tell
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        lease = _Lease(self)
        try:
            body = await self._body(scope, receive, lease)
        except ApiError as failure:
            await self.respond(failure)(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _Replay(body, receive), send)
        finally:
            lease.release()

    async def _body(self, scope: Scope, receive: Receive, lease: _Lease) -> bytes | None:
        """Return the body, empty where the endpoint takes none; None where the client has disconnected."""
        takes_body = scope["path"] in BODY_PATHS
        if takes_body and scope["method"] == "POST":
            body = await self._read(scope, receive, lease)
            if body is not None:
                lease.grow(parsed_bytes(body))
            return body
        if not takes_body and scope["method"] in ("GET", "HEAD") and has_body(scope):
            words = f"{scope['method']} takes no body; send the request without one"
            raise ApiError(400, words, code="unexpected_body", headers=CLOSE)
        return b""  # not read: the application answers 404 or 405, and the server discards what arrives

    async def _read(self, scope: Scope, receive: Receive, lease: _Lease) -> bytes | None:
        if content_length(scope) > self.max_bytes:
            raise self._too_large()
        body, more = bytearray(), True
        deadline = asyncio.get_running_loop().time() + self.timeout
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                words = f"the body took more than {self.timeout:g} seconds"
                raise ApiError(408, words, code="body_timeout") from None
            if message["type"] == "http.disconnect":
                return None
            more = message.get("more_body", False)
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                raise self._too_large()
            lease.grow(len(message.get("body", b"")))
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.max_bytes} bytes; send less", code="body_too_large")


class _Lease:
    """The bytes that one request holds of a guard's total."""

    def __init__(self, guard: BodyLimitMiddleware) -> None:
        self._guard, self._size = guard, 0

    def grow(self, size: int) -> None:
        """Hold more bytes. A request that is the only one may hold more than the total allows."""
        self._size += size
        self._guard.held_bytes += size
        if self._guard.held_bytes > self._guard.max_held_bytes and self._guard.held_bytes > self._size:
            words = "the request bodies in flight take all memory set aside for them; retry later"
            headers = {"Retry-After": "1"}
            raise ApiError(429, words, "rate_limit_error", code="bodies_full", headers=headers)

    def release(self) -> None:
        self._guard.held_bytes -= self._size
        self._size = 0


def content_length(scope: Scope) -> int:
    """Return the announced length of a body; 0 where none is."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() else 0


def has_body(scope: Scope) -> bool:
    return content_length(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


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


def build_middleware(config: ServerConfig, tell: ErrorResponder) -> list[Middleware]:
    """Return the middleware, innermost first. Keys come before bodies: a caller without a key takes no memory."""
    found = [
        Middleware(
            BodyLimitMiddleware,
            most=config.max_body_bytes,
            most_held=config.max_held_bytes,
            seconds=config.body_timeout,
            tell=tell,
        ),
        Middleware(ApiKeyMiddleware, keys=config.api_key, tell=tell),
    ]
    if not config.api_key and is_loopback(config.host):
        found.append(Middleware(HostMiddleware, names=config.allowed_host, tell=tell))
    if config.cors_origin:
        origins = list(config.cors_origin)
        found.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    found.append(Middleware(FramingMiddleware, tell=tell))  # before all that answers without closing the connection
    return found


def wrap(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """Return the application inside its middleware."""
    for layer in layers:
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
