"""The routes of OpenAI's Responses API: /v1/responses, /v1/responses/input_tokens and /v1/responses/{id}."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response

from foretell.server.json_body import JsonRoute
from foretell.server.middleware import client_key, hold_bytes
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai_responses.builder import ResponsesBuilder
from foretell.server.openai_responses.input_items import Message
from foretell.server.openai_responses.requests import InputTokensRequest, ResponsesRequest
from foretell.server.openai_responses.responses import DeletedResponse, InputTokenCount, ResponseBody
from foretell.server.openai_responses.store import ResponseStore, StoredResponse
from foretell.server.request_model import report_ignored
from foretell.server.routes.generate import ERRORS, STREAM, error_responses, respond_translated
from foretell.server.service import Service, tenant

READ_ERRORS = error_responses(401, 403, 404)
ResponseId = Annotated[str, Path(description="The id of a stored response.")]


def responses_routes(service: Service) -> APIRouter:
    """Return the routes of the Responses API."""
    router = APIRouter(tags=["OpenAI responses"], route_class=JsonRoute)
    stored = ResponseStore(service.config.response_store_bytes, service.config.max_body_bytes)

    async def earlier_of(body: InputTokensRequest, request: Request) -> StoredResponse | None:
        earlier = await stored.conversation(owner_of(request), body.previous_response_id)
        if earlier is not None:
            hold_bytes(request.scope, earlier.held_bytes)
        return earlier

    @router.post(
        "/v1/responses", response_model=None, responses={200: {"model": ResponseBody, "content": STREAM}, **ERRORS}
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response, in OpenAI's newer API."""
        owner, earlier = owner_of(request), await earlier_of(body, request)

        def translate() -> ChatCompletionRequest:
            return body.to_chat([] if earlier is None else earlier.messages())

        def store(response: dict[str, Any], answer: Message) -> None:
            def encode() -> StoredResponse:
                return StoredResponse.encode(response, earlier, [*body.new_messages(), answer])

            stored.put_later(owner, response["id"], partial(service.in_worker, encode))

        builder = partial(ResponsesBuilder, body, store if stored.enabled and body.store is not False else None)
        report_ignored(body.hosted_tools)
        return await respond_translated(service, request, translate, "resp_", builder)

    @router.post(
        "/v1/responses/input_tokens",
        response_model=None,
        responses={200: {"model": InputTokenCount}, **ERRORS},
    )
    async def input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Count the prompt tokens of a response, also of one beyond the context."""
        service.check_model(body.model)
        earlier = await earlier_of(body, request)

        def count() -> int:
            return service.preprocessor.count_chat_tokens(body.to_chat([] if earlier is None else earlier.messages()))

        report_ignored(body.hosted_tools)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": await service.run_in_worker(count)})

    @router.get(
        "/v1/responses/{response_id}",
        response_model=None,
        responses={200: {"model": ResponseBody}, **READ_ERRORS},
    )
    async def read(response_id: ResponseId, request: Request) -> Response:
        """Return a stored response."""
        entry = await stored.get(owner_of(request), response_id)
        return Response(entry.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses=READ_ERRORS)
    async def delete(response_id: ResponseId, request: Request) -> DeletedResponse:
        """Remove a stored response."""
        await stored.delete(owner_of(request), response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    return router


def owner_of(request: Request) -> str:
    """Return whose stored responses a request may use: those of its API key."""
    return tenant(client_key(request.scope), None)
