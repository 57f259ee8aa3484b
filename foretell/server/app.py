"""The FastAPI application: routes, middleware, exception handlers and the OpenAPI schema."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretell.errors import ForetellError
from foretell.server.anthropic.requests import CountTokensRequest, MessagesRequest
from foretell.server.llama_cpp.requests import ApplyTemplateRequest, InfillRequest, LlamaCompletionRequest
from foretell.server.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from foretell.server.openai.chat_requests import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from foretell.server.openai.requests import CompletionRequest, Speculative
from foretell.server.openai_responses.requests import InputTokensRequest, ResponsesRequest
from foretell.server.routes.generate import generate_routes
from foretell.server.routes.llama_cpp import llama_cpp_routes
from foretell.server.routes.messages import messages_routes
from foretell.server.routes.ollama import ollama_routes
from foretell.server.routes.openapi_page import openapi_routes
from foretell.server.routes.playground import playground_routes
from foretell.server.routes.responses import responses_routes
from foretell.server.routes.status import status_routes
from foretell.server.routes.tokenize import tokenize_routes
from foretell.version import VERSION

from .background_tasks import StatsLogger
from .dialects import dialect_of
from .errors import ApiError, routing_error, to_api_error, validation_error
from .middleware import ErrorResponder, build_middleware
from .service import Service
from .sse import ClientDisconnected
from .translation import TranslatedValidationError

LOG = logging.getLogger("foretell")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a disconnected client; it is never sent
REQUEST_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": ShowRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/completion": LlamaCompletionRequest,
    "/infill": InfillRequest,
    "/apply-template": ApplyTemplateRequest,
}
# Lists of token ids in request bodies.
TOKEN_FIELDS = [
    ("CompletionRequest", "prompt"),
    ("DetokenizeRequest", "tokens"),
    *[
        (name, field)
        for name in ("CompletionRequest", "ChatCompletionRequest")
        for field in ("stop_token_ids", "allowed_token_ids")
    ],
]


def create_app(service: Service) -> FastAPI:
    """Create the application of one service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        tasks = [asyncio.ensure_future(StatsLogger(service).run())]
        if service.draft_reloader is not None:
            tasks.append(asyncio.ensure_future(service.draft_reloader.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await service.close()

    app = FastAPI(title="Foretell", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.strict_fields = service.config.strict_fields
    app.include_router(generate_routes(service))
    app.include_router(messages_routes(service))
    app.include_router(responses_routes(service))
    app.include_router(ollama_routes(service))
    app.include_router(status_routes(service))
    app.include_router(tokenize_routes(service))
    app.include_router(llama_cpp_routes(service))
    app.include_router(playground_routes())
    app.include_router(openapi_routes(lambda: _openapi_schema(app, service)))

    def error_response(error: ApiError, path: str) -> Response:
        service.metrics.prometheus.failures.inc(error.code or "")
        return dialect_of(path).response(error)

    _add_exception_handlers(app, error_response)
    for layer in build_middleware(service.config, error_response):
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    app.openapi = lambda: _openapi_schema(app, service)  # type: ignore[method-assign]
    return app


def _add_exception_handlers(app: FastAPI, error_response: ErrorResponder) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error), request.url.path)

    async def unknown(request: Request, error: Exception) -> Response:
        LOG.error("a request to %s failed", request.url.path, exc_info=error)
        return error_response(to_api_error(error), request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for this class"
        found = validation_error(error, REQUEST_BODIES.get(request.url.path))
        found.is_named = not isinstance(error, TranslatedValidationError)
        return error_response(found, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class"
        return error_response(routing_error(error, request, app.openapi()["paths"]), request.url.path)

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(ForetellError, known)
    app.add_exception_handler(TimeoutError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_exception_handler(Exception, unknown)


def _openapi_schema(app: FastAPI, service: Service) -> dict[str, Any]:
    """Return the OpenAPI schema. Invalid bodies get 400, so FastAPI's 422 responses are removed."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        _describe_checks(schema["components"]["schemas"], service)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_checks(schemas: dict[str, Any], service: Service) -> None:
    """Describe what depends on the server: the range of token ids, and whether unknown fields are ignored."""
    largest = service.assembly.requests.limits.vocab - 1
    for name, field in TOKEN_FIELDS:
        for integers in _integer_items(schemas[name]["properties"][field]):
            integers |= {"minimum": 0, "maximum": largest}
    if not service.config.strict_fields:
        for name, schema in schemas.items():
            if name != Speculative.__name__ and schema.get("additionalProperties") is False:
                del schema["additionalProperties"]


def _integer_items(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the integers in the lists of a schema."""
    if isinstance(schema, dict):
        items = schema.get("items")
        if isinstance(items, dict) and items.get("type") == "integer":
            yield items
        yield from (found for value in schema.values() for found in _integer_items(value))
    elif isinstance(schema, list):
        yield from (found for value in schema for found in _integer_items(value))
