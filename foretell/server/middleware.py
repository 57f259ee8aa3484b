"""The middleware of a server: what a request passes before it reaches an endpoint, or a replica."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .config import ServerConfig
from .guards import BodyGuard, FramingGuard, HostGuard, KeyGuard, Tell, is_loopback


def middleware_of(config: ServerConfig, tell: Tell) -> list[Middleware]:
    """Return the middleware, innermost first. Keys come before bodies: a caller without a key takes no memory."""
    found = [
        Middleware(
            BodyGuard,
            most=config.max_body_bytes,
            most_held=config.max_held_bytes,
            seconds=config.body_timeout,
            tell=tell,
        ),
        Middleware(KeyGuard, keys=config.api_key, tell=tell),
    ]
    if not config.api_key and is_loopback(config.host):
        found.append(Middleware(HostGuard, names=config.allowed_host, tell=tell))
    if config.cors_origin:
        origins = list(config.cors_origin)
        found.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    found.append(Middleware(FramingGuard, tell=tell))  # before all that answers without closing the connection
    return found


def wrapped(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """Return the application inside its middleware."""
    for layer in layers:
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
