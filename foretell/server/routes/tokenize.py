"""The endpoints of the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foretell.errors import RequestError
from foretell.server.chat_template import apply_chat_template
from foretell.server.json_body import JsonRoute
from foretell.server.openai.chat_requests import DetokenizeRequest, TokenizeRequest
from foretell.server.openai.responses import DetokenizeResponse, TokenizeResponse
from foretell.server.preprocess import RequestPreprocessor
from foretell.server.routes.generate import error_responses
from foretell.server.service import Service

REFUSALS = error_responses(400, 401, 403, 404, 408, 413, 429, 504)


def tokenize_routes(service: Service) -> APIRouter:
    """/tokenize and /detokenize."""
    router = APIRouter(tags=["spelling"], route_class=JsonRoute)

    @router.post("/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}, **REFUSALS})
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a prompt or a chat."""
        service.check_model(body.model)
        return await service.run_in_worker(_tokenize, service.preprocessor, body)

    @router.post("/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}, **REFUSALS})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        return await service.run_in_worker(_detokenize, service.preprocessor, body)

    return router


def _tokenize(desk: RequestPreprocessor, body: TokenizeRequest) -> Response:
    """Return at most as many tokens as the context has, encoded as JSON already: both would hold up the event loop."""
    if (body.prompt is None) == (not body.messages):
        raise RequestError("prompt", "give a prompt, or messages, and not both")
    tokenizer = desk.tokenizer
    if body.prompt is not None:
        desk.check_length("prompt", body.prompt)
        tokens = tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    else:
        text = apply_chat_template(tokenizer, body, body.tools)
        desk.check_length("messages", text)
        tokens = tokenizer.encode(text, add_special=False)
    desk.check_length("messages" if body.prompt is None else "prompt", tokens)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": desk.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return JSONResponse(found)


def _detokenize(desk: RequestPreprocessor, body: DetokenizeRequest) -> Response:
    desk.check_length("tokens", body.tokens)
    vocab = desk.assembly.requests.limits.vocab
    if not all(0 <= token < vocab for token in body.tokens):
        raise RequestError("tokens", f"has token ids outside 0..{vocab - 1}")
    return JSONResponse({"prompt": desk.tokenizer.decode(body.tokens, skip_special=False)})
