"""The FastAPI application: routes, middleware, exception handlers and the OpenAPI schema."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretell.errors import ForetellError
from foretell.server.anthropic.requests import CountTokensRequest, MessagesRequest
from foretell.server.llama_cpp.requests import ApplyTemplateRequest, InfillRequest, LlamaCompletionRequest
from foretell.server.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from foretell.server.openai.chat_requests import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from foretell.server.openai.requests import CompletionRequest
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
from .openapi import openapi_schema
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
    app.include_router(openapi_routes(lambda: openapi_schema(app, service)))

    def error_response(error: ApiError, path: str) -> Response:
        service.metrics.prometheus.failures.inc(error.code or "")
        return dialect_of(path).response(error)

    _add_exception_handlers(app, error_response)
    for layer in build_middleware(service.config, error_response):
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    app.openapi = lambda: openapi_schema(app, service)  # type: ignore[method-assign]
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
