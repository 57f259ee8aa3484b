"""The routes of Ollama's API under /api."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretell.server.json_body import JsonRoute
from foretell.server.ollama.builders import OllamaChatBuilder, OllamaGenerateBuilder, now
from foretell.server.ollama.models import OllamaModels
from foretell.server.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    ShowRequest,
)
from foretell.server.ollama.responses import (
    OllamaChatResponse,
    OllamaError,
    OllamaGenerateResponse,
    OllamaModelInfo,
    OllamaModelList,
    OllamaVersion,
)
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import CompletionRequest, GenerationRequest
from foretell.server.preprocess import ClientContext, RequestPreprocessor
from foretell.server.routes.generate import ERRORS, Preprocess, error_responses, respond_translated
from foretell.server.service import Service

OLLAMA_ERRORS = error_responses(*ERRORS, model=OllamaError)
READ_ERRORS = error_responses(401, 403, model=OllamaError)
LINES: dict[str, dict[str, Any]] = {"application/x-ndjson": {}}


class AnyTypeJsonRoute(JsonRoute):
    """A route that takes JSON under any content type, as Ollama does: `curl -d` sends it as a form.

    A web page may send such a body to another origin without asking first. Browsers name the page's origin then, and
    requests with an origin need the content type of JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_any_type(request: Request) -> Response:
            if "origin" not in request.headers:
                headers = [each for each in request.scope["headers"] if each[0] != b"content-type"]
                request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(request)

        return handle_any_type


def ollama_routes(service: Service) -> APIRouter:
    """Return the routes of Ollama's API."""
    router = APIRouter(tags=["Ollama"], route_class=AnyTypeJsonRoute)
    models = OllamaModels(service)
    _add_generation_routes(router, service, models)
    _add_model_routes(router, models)
    return router


def _add_generation_routes(router: APIRouter, service: Service, models: OllamaModels) -> None:
    preprocessor = service.preprocessor

    @router.post(
        "/api/chat",
        response_model=None,
        responses={200: {"model": OllamaChatResponse, "content": LINES}, **OLLAMA_ERRORS},
    )
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Generate the assistant's next message of a conversation, in Ollama's API."""
        model = models.served_name(body.model)
        if not body.messages:
            asked = body.model_copy(update={"messages": [OllamaMessage(role="user", content="a")]})
            await service.run_in_worker(check_settings, preprocessor, lambda: asked.to_chat(model))
            return _only_loaded(body, model, {"message": {"role": "assistant", "content": ""}})
        return await respond_translated(service, request, lambda: body.to_chat(model), "chat-", OllamaChatBuilder)

    @router.post(
        "/api/generate",
        response_model=None,
        responses={200: {"model": OllamaGenerateResponse, "content": LINES}, **OLLAMA_ERRORS},
    )
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Generate the answer to a prompt, in Ollama's API."""
        model = models.served_name(body.model)
        raw = bool(body.raw or body.suffix) or not preprocessor.tokenizer.chat_template
        asked = body if body.prompt or body.suffix else body.model_copy(update={"prompt": "a"})

        def translate() -> GenerationRequest:
            return raw_completion(preprocessor, asked, model) if raw else asked.to_chat(model)

        if asked is not body:
            await service.run_in_worker(check_settings, preprocessor, translate)
            return _only_loaded(body, model, {"response": ""})
        return await respond_translated(service, request, translate, "gen-", OllamaGenerateBuilder)


def raw_completion(preprocessor: RequestPreprocessor, body: OllamaGenerateRequest, model: str) -> CompletionRequest:
    """Return the completion of a raw prompt or of the gap before a suffix.

    Its limit is the rest of the context, and a smaller one if it is not streamed: its client waits for the end.
    """
    fields = body.raw_fields(model)
    if body.suffix:
        before = body.prompt or ""
        preprocessor.check_length("prompt", before + body.suffix)
        tokens = preprocessor.fim_prompt("suffix", before, body.suffix)
        fields |= {"prompt": before, "suffix": body.suffix}
    else:
        preprocessor.check_length("prompt", body.raw_prompt)
        tokens = preprocessor.tokenizer.encode(body.raw_prompt)
        fields |= {"prompt": tokens}
    limit = preprocessor.output_limit(len(tokens), streamed=fields["stream"])
    return CompletionRequest.model_validate({"max_tokens": limit, **fields})


def check_settings(preprocessor: RequestPreprocessor, translate: Callable[[], GenerationRequest]) -> None:
    """Refuse a request without a prompt for what it would be refused with one."""
    body = translate()
    is_chat = isinstance(body, ChatCompletionRequest)
    preprocess: Preprocess = preprocessor.preprocess_chat if is_chat else preprocessor.preprocess_completion
    preprocess(body, ClientContext("", ""))


def _only_loaded(body: OllamaRequest, model: str, output: dict[str, Any]) -> Response:
    """Return the response to a request without a prompt, with which clients load and unload a model."""
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    return JSONResponse({"model": model, "created_at": now(), **output, "done": True, "done_reason": reason})


def _add_model_routes(router: APIRouter, models: OllamaModels) -> None:
    @router.get("/api/version", response_model=None, responses={200: {"model": OllamaVersion}, **READ_ERRORS})
    async def version() -> Response:
        """Return the version of Ollama's API."""
        return JSONResponse(models.version())

    @router.get("/api/tags", response_model=None, responses={200: {"model": OllamaModelList}, **READ_ERRORS})
    async def tags() -> Response:
        """List the names under which the model is served."""
        return JSONResponse(models.tags())

    @router.get("/api/ps", response_model=None, responses={200: {"model": OllamaModelList}, **READ_ERRORS})
    async def ps() -> Response:
        """List the loaded model."""
        return JSONResponse(models.running())

    @router.post("/api/show", response_model=None, responses={200: {"model": OllamaModelInfo}, **OLLAMA_ERRORS})
    async def show(body: ShowRequest) -> Response:
        """Describe the model."""
        return JSONResponse(models.show(models.served_name(body.model or body.name)))
