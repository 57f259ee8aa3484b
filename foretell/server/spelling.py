"""The endpoints of the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.errors import RequestError

from .chats import render
from .protocol_chat import DetokenizeBody, TokenizeBody
from .protocol_replies import Prompt, Tokens
from .service import Service
from .writing import some

REFUSALS = some(400, 401, 403, 404, 408, 413, 429, 504)


def spelling_routes(service: Service) -> APIRouter:
    """/tokenize and /detokenize."""
    router = APIRouter(tags=["spelling"])

    @router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **REFUSALS})
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a prompt or a chat."""
        service.check_model(body.model)
        return JSONResponse(await service.settle(_tokenize, service, body))

    @router.post("/detokenize", response_model=None, responses={200: {"model": Prompt}, **REFUSALS})
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        return JSONResponse({"prompt": await service.settle(_detokenize, service, body)})

    return router


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
