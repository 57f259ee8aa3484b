"""The routes of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretell.server.anthropic.message_builder import MessageBuilder
from foretell.server.anthropic.requests import CountTokensRequest, MessagesRequest
from foretell.server.anthropic.responses import AnthropicError, Message, TokenCount
from foretell.server.json_body import JsonRoute
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.request_model import report_ignored
from foretell.server.routes.generate import ERRORS, STREAM, error_responses, respond_translated
from foretell.server.service import Service

ANTHROPIC_ERRORS = error_responses(*ERRORS, model=AnthropicError)


def messages_routes(service: Service) -> APIRouter:
    """Return the routes of Anthropic's API."""
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)
    preprocessor = service.preprocessor

    @router.post(
        "/v1/messages",
        response_model=None,
        responses={200: {"model": Message, "content": STREAM}, **ANTHROPIC_ERRORS},
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Generate the assistant's next message of a conversation, in Anthropic's API."""

        def translate() -> ChatCompletionRequest:
            return body.to_chat(reasons=preprocessor.parses_reasoning)

        report_ignored(body.hosted_tools)
        return await respond_translated(service, request, translate, "msg_", MessageBuilder)

    @router.post(
        "/v1/messages/count_tokens", response_model=None, responses={200: {"model": TokenCount}, **ANTHROPIC_ERRORS}
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the prompt tokens of a message, also of one beyond the context."""
        service.check_model(body.model)
        report_ignored(body.hosted_tools)

        def count() -> int:
            return preprocessor.count_chat_tokens(body.to_chat(reasons=preprocessor.parses_reasoning))

        return JSONResponse({"input_tokens": await service.run_in_worker(count)})

    return router
