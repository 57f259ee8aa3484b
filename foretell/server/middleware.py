"""The ASGI middleware of the server and the gateway: API keys, Host header, request framing and body limits."""

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
BODY_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/tokenize",
    "/detokenize",
    "/completion",
    "/infill",
    "/apply-template",
)  # endpoints that take a body with POST
LOCALHOST = "localhost"
HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")  # with an optional port
CLOSE = {"Connection": "close"}
RESERVATION_KEY = "foretell_reservation"  # key of the bytes held for a request in its scope

ErrorResponder = Callable[[ApiError, str], Response]  # counts an error of a path and returns its response


class ApiKeys:
    """The valid API keys, stored as digests. Every check takes the same time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, key: str) -> bool:
        """Return whether a key is valid; without configured keys, every key is."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, for constant time
        return any(matches) or not self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def client_key(scope: Scope) -> str:
    """Return the bearer token of the Authorization header, else Anthropic's x-api-key; empty if there is neither.

    Clients send keys beyond ASCII in UTF-8, a few in Latin-1, in which every byte string can be decoded.
    """
    headers = {bytes(name): value for name, value in reversed(scope["headers"])}  # the first of several counts
    kind, _, key = _decode(headers.get(b"authorization", b"")).partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return _decode(headers.get(b"x-api-key", b"")).strip()


def _decode(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def is_public(path: str) -> bool:
    """Return whether a path needs no API key: it reveals no prompts or outputs, or is the playground page."""
    return path in PUBLIC_PATHS or is_page(path)


class ApiKeyMiddleware:
    """Rejects requests without a valid API key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], tell: ErrorResponder) -> None:
        self.app, self.keys, self.respond = app, ApiKeys(keys), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope["path"]) or self.keys.accepts(client_key(scope)):
            await self.app(scope, receive, send)
            return
        message = "an API key is required: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
        error = ApiError(401, message, "authentication_error", code="invalid_api_key")
        await self.respond(error, scope["path"])(scope, receive, send)


class HostMiddleware:
    """Rejects requests whose Host header is neither loopback nor allowed.

    A web page can make its own host name resolve to this machine (DNS rebinding) and would then pass as a local
    client; the Host header reveals it.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], tell: ErrorResponder) -> None:
        self.app, self.names, self.respond = app, frozenset(name.lower() for name in names), tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(requested_host(scope)):
            await self.app(scope, receive, send)
            return
        message = "this server accepts only the host localhost; start it with --allowed-host NAME or --api-key"
        error = ApiError(403, message, "permission_error", code="host_not_allowed")
        await self.respond(error, scope["path"])(scope, receive, send)

    def _is_allowed(self, host: str | None) -> bool:
        return host is None or host in self.names or is_loopback(host)


def requested_host(scope: Scope) -> str | None:
    """Return the host of the Host header without its port: None where there is no header, "" for a malformed one."""
    for name, value in scope["headers"]:
        if name == b"host":
            host = HOST.fullmatch(value.decode("latin-1").lower())
            return "" if host is None else host["v6"] or host["name"] or ""
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOCALHOST or host.endswith("." + LOCALHOST)


class FramingMiddleware:
    """Rejects requests with both Content-Length and Transfer-Encoding, and closes the connection.

    The HTTP parser uses one of them. A proxy that uses the other takes part of the body for the next request (request
    smuggling).
    """

    def __init__(self, app: ASGIApp, tell: ErrorResponder) -> None:
        self.app, self.respond = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if scope["type"] != "http" or not names >= {b"content-length", b"transfer-encoding"}:
            await self.app(scope, receive, send)
            return
        message = "send Content-Length or Transfer-Encoding, not both"
        error = ApiError(400, message, code="ambiguous_length", headers=CLOSE)
        await self.respond(error, scope["path"])(scope, receive, send)


class BodyLimitMiddleware:
    """Rejects bodies that are too large, too slow or too many for memory, and bodies of endpoints that take none."""

    def __init__(self, app: ASGIApp, most: int, most_held: int, seconds: float, tell: ErrorResponder) -> None:
        """`most` bytes of one body; `most_held` bytes of all bodies that are held, raw and parsed."""
        self.app, self.max_bytes, self.max_held_bytes, self.timeout, self.respond = app, most, most_held, seconds, tell
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[RESERVATION_KEY] = reservation = _BodyReservation(self)
        try:
            body = await self._body(scope, receive, reservation)
        except ApiError as error:
            await self.respond(error, scope["path"])(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _ReplayedBody(body, receive), send)
        finally:
            reservation.release()

    async def _body(self, scope: Scope, receive: Receive, reservation: _BodyReservation) -> bytes | None:
        """Return the body, empty if the endpoint takes none; None if the client has disconnected."""
        takes_body = scope["path"] in BODY_PATHS
        if takes_body and scope["method"] == "POST":
            body = await self._read(scope, receive, reservation)
            if body is not None:
                reservation.grow(parsed_bytes(body))
            return body
        if not takes_body and scope["method"] in ("GET", "HEAD") and has_body(scope):
            message = f"{scope['method']} takes no body; send the request without one"
            raise ApiError(400, message, code="unexpected_body", headers=CLOSE)
        return b""  # not read: the application answers 404 or 405, and the server discards the body

    async def _read(self, scope: Scope, receive: Receive, reservation: _BodyReservation) -> bytes | None:
        if content_length(scope) > self.max_bytes:
            raise self._too_large()
        body, more = bytearray(), True
        deadline = asyncio.get_running_loop().time() + self.timeout
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the body took more than {self.timeout:g} seconds"
                raise ApiError(408, reason, code="body_timeout") from None
            if message["type"] == "http.disconnect":
                return None
            more = message.get("more_body", False)
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                raise self._too_large()
            reservation.grow(len(message.get("body", b"")))
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self.max_bytes} bytes; send a smaller one", code="body_too_large"
        )


class _BodyReservation:
    """The bytes that one request holds of the total for request bodies."""

    def __init__(self, limiter: BodyLimitMiddleware) -> None:
        self._limiter, self._size = limiter, 0

    def grow(self, size: int) -> None:
        """Hold more bytes; raise 429 beyond the total, unless this is the only request."""
        self._size += size
        self._limiter.held_bytes += size
        if self._limiter.held_bytes > self._limiter.max_held_bytes and self._limiter.held_bytes > self._size:
            message = "the memory for request bodies is in use; retry later"
            headers = {"Retry-After": "1"}
            raise ApiError(429, message, "rate_limit_error", code="bodies_full", headers=headers)

    def release(self) -> None:
        self._limiter.held_bytes -= self._size
        self._size = 0


def hold_bytes(scope: Scope, size: int) -> None:
    """Count `size` bytes, such as those of a stored conversation, like a part of the request's body; raise 429."""
    scope[RESERVATION_KEY].grow(size)


def content_length(scope: Scope) -> int:
    """Return the Content-Length of a request; 0 if there is none."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() else 0


def has_body(scope: Scope) -> bool:
    return content_length(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


class _ReplayedBody:
    """An ASGI receive channel that returns a body already read, then the messages after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is None:
            return await self.receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


def build_middleware(config: ServerConfig, tell: ErrorResponder) -> list[Middleware]:
    """Return the middleware, innermost first. Keys are checked before bodies: clients without a key take no memory."""
    layers = [
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
        layers.append(Middleware(HostMiddleware, names=config.allowed_host, tell=tell))
    if config.cors_origin:
        origins = list(config.cors_origin)
        layers.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    layers.append(
        Middleware(FramingMiddleware, tell=tell)
    )  # outermost: the others respond without closing the connection
    return layers


def wrap(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """Wrap the application in its middleware."""
    for layer in layers:
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
