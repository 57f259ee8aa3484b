"""The tokenizer endpoints: /tokenize and /detokenize."""

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

ERROR_RESPONSES = error_responses(400, 401, 403, 404, 408, 413, 429, 504)


def tokenize_routes(service: Service) -> APIRouter:
    """Return the routes of /tokenize and /detokenize."""
    router = APIRouter(tags=["tokenization"], route_class=JsonRoute)

    @router.post("/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}, **ERROR_RESPONSES})
    async def tokenize(body: TokenizeRequest) -> Response:
        """Tokenize a prompt or the messages of a chat."""
        service.check_model(body.model)
        return await service.run_in_worker(_tokenize, service.preprocessor, body)

    @router.post("/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}, **ERROR_RESPONSES})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Decode token ids to text."""
        service.check_model(body.model)
        return await service.run_in_worker(_detokenize, service.preprocessor, body)

    return router


def _tokenize(preprocessor: RequestPreprocessor, body: TokenizeRequest) -> Response:
    """Return the tokens as a JSON response; encoding them here keeps the event loop free."""
    if (body.prompt is not None) + (body.content is not None) + bool(body.messages) != 1:
        raise RequestError("prompt", "give either prompt or messages")
    tokenizer = preprocessor.tokenizer
    field = "messages" if body.messages else "content" if body.prompt is None else "prompt"
    if not body.messages:
        text = body.content or "" if body.prompt is None else body.prompt
        preprocessor.check_length(field, text)
        add_special = body.add_special if body.prompt is None else body.add_special_tokens
        tokens = tokenizer.encode(text, add_special=add_special)
    else:
        text = apply_chat_template(tokenizer, body, body.tools)
        preprocessor.check_length("messages", text)
        tokens = tokenizer.encode(text, add_special=False)
    preprocessor.check_length(field, tokens)
    body_fields: dict[str, Any] = {"count": len(tokens), "max_model_len": preprocessor.max_model_len, "tokens": tokens}
    if body.with_pieces:
        body_fields["tokens"] = [{"id": token, "piece": tokenizer.token_text(token)} for token in tokens]
    if body.return_token_strs:
        body_fields["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return JSONResponse(body_fields)


def _detokenize(preprocessor: RequestPreprocessor, body: DetokenizeRequest) -> Response:
    preprocessor.check_length("tokens", body.tokens)
    vocab = preprocessor.assembly.requests.limits.vocab
    if not all(0 <= token < vocab for token in body.tokens):
        raise RequestError("tokens", f"has token ids outside 0..{vocab - 1}")
    text = preprocessor.tokenizer.decode(body.tokens, skip_special=False)
    return JSONResponse({"prompt": text, "content": text})
