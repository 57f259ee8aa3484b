"""The endpoints that tell of the server, and those of its tokenizer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.errors import RequestError
from foretell.version import VERSION

from .chats import render
from .protocol_chat import DetokenizeBody, TokenizeBody
from .protocol_replies import ModelCard, ModelList, Prompt, Standing, Tokens, Version
from .service import Service
from .writing import ERRORS

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WELL: dict[int | str, dict[str, Any]] = {
    200: {"model": Standing},
    503: {"model": Standing, "description": "Not well; `reason` says why"},
}


def some(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of these errors."""
    return {status: ERRORS[status] for status in statuses}


def telling_routes(service: Service) -> APIRouter:
    """Models, metrics, health and the like."""
    router = APIRouter(tags=["telling"])
    created = int(time.time())

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=created,
            owned_by="foretell",
            root=service.engine_config.model,
            max_model_len=service.desk.context,
            drafter=service.assembly.engine.drafter.name,
        )

    @router.get("/v1/models", responses=some(401))
    async def models() -> ModelList:
        """The names the model is served under."""
        return ModelList(object="list", data=[card(name) for name in service.names])

    @router.get("/v1/models/{name:path}", responses=some(401, 404))
    async def model(name: str) -> ModelCard:
        """One of them."""
        return card(service.check_model(name))

    @router.get("/health", response_model=None, responses=WELL)
    async def health() -> Response:
        """Whether the engine works."""
        return _standing(service.problem)

    @router.get("/ready", response_model=None, responses=WELL)
    async def ready() -> Response:
        """Whether new requests are taken."""
        return _standing("the server is about to stop" if service.engine.draining else service.problem)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        service.metrics.observe_load(service.engine.load)
        return Response(service.metrics.expose(service.config.metrics_names), media_type=METRICS_TYPE)

    @router.get("/version")
    async def version() -> Version:
        """Of this server."""
        return Version(version=VERSION)

    @router.get("/server_info", responses=some(401))
    async def server_info() -> dict[str, Any]:
        """What is served, with what memory, and how it goes."""
        return service.info()

    @router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **some(400, 401, 404, 408, 413)})
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a prompt or a chat."""
        service.check_model(body.model)
        return JSONResponse(await service.settle(_tokenize, service, body))

    @router.post(
        "/detokenize", response_model=None, responses={200: {"model": Prompt}, **some(400, 401, 404, 408, 413)}
    )
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        return JSONResponse({"prompt": await service.settle(_detokenize, service, body)})

    return router


def _standing(reason: str | None) -> Response:
    status = "ok" if reason is None else "unavailable"
    return JSONResponse({"status": status, "reason": reason}, 200 if reason is None else 503)


def _tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (not body.messages):
        raise RequestError("prompt", "give a prompt, or messages, and not both")
    tokenizer = service.assembly.tokenizer
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    else:
        tokens = tokenizer.encode(render(tokenizer, body, body.tools), add_special=False)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": service.desk.context, "tokens": tokens}
    return found | ({"token_strs": [tokenizer.token_text(t) for t in tokens]} if body.return_token_strs else {})


def _detokenize(service: Service, body: DetokenizeBody) -> str:
    vocab = service.assembly.requests.limits.vocab
    if not all(0 <= token < vocab for token in body.tokens):
        raise RequestError("tokens", f"has token ids outside 0..{vocab - 1}")
    return service.assembly.tokenizer.decode(body.tokens, skip_special=False)
