"""The application: endpoints, guards before them, and what callers are told when something fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretell.errors import ForetellError
from foretell.server.openai.chat_requests import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from foretell.server.openai.requests import CompletionRequest
from foretell.server.routes.generate import generate_routes
from foretell.server.routes.openapi_page import openapi_routes
from foretell.server.routes.playground import playground_routes
from foretell.server.routes.status import status_routes
from foretell.server.routes.tokenize import tokenize_routes
from foretell.version import VERSION

from .background_tasks import StatsLogger
from .errors import ApiError, to_api_error, validation_error
from .middleware import ErrorResponder, build_middleware
from .service import Service
from .sse import ClientDisconnected

LOG = logging.getLogger("foretell")
GONE = 499  # nginx's word for a caller who left; nobody reads it
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def create_app(service: Service) -> FastAPI:
    """The API over one service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        beside = [asyncio.ensure_future(StatsLogger(service).run())]
        if service.draft_reloader is not None:
            beside.append(asyncio.ensure_future(service.draft_reloader.run()))
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await service.close()

    app = FastAPI(title="Foretell", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(generate_routes(service))
    app.include_router(status_routes(service))
    app.include_router(tokenize_routes(service))
    app.include_router(playground_routes())
    app.include_router(openapi_routes(lambda: _describe(app)))

    def tell(failure: ApiError) -> Response:
        service.metrics.prometheus.failures.inc(failure.code or "")
        return failure.response()

    _add_handlers(app, tell)
    for layer in build_middleware(service.config, tell):
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _add_handlers(app: FastAPI, tell: ErrorResponder) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return tell(to_api_error(error))

    async def unknown(request: Request, error: Exception) -> Response:
        LOG.error("a request to %s failed", request.url.path, exc_info=error)
        return tell(to_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "it is registered for these"
        body = BODIES.get(request.url.path)
        return tell(validation_error(error, list(body.model_fields) if body is not None else []))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        return tell(ApiError(error.status_code, str(error.detail), headers=error.headers or {}))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(ForetellError, known)
    app.add_exception_handler(TimeoutError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnected, gone)
    app.add_exception_handler(Exception, unknown)


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; what is wrong with a body is told with 400, never with FastAPI's own 422."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        app.openapi_schema = found
    return app.openapi_schema
