"""The generation endpoints: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from foretell.server.errors import INTERNAL, ApiError, to_api_error
from foretell.server.http_protocol import DirectConnection
from foretell.server.json_body import JsonRoute
from foretell.server.middleware import client_key
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import CompletionRequest, GenerationRequest
from foretell.server.openai.response_builder import ChatResponseBuilder, CompletionResponseBuilder
from foretell.server.openai.responses import ChatCompletion, ErrorResponse, TextCompletion
from foretell.server.preprocess import ClientContext, GenerationJob
from foretell.server.response_builder import ResponseBuilder
from foretell.server.service import Service
from foretell.server.sse import EventStreamResponse, cancel_on_disconnect

if TYPE_CHECKING:
    from foretell.engine.streams import Stream, StreamItem

LOG = logging.getLogger("foretell")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "A field is invalid or not supported; `param` names it",
        401: "The API key is missing or wrong",
        403: "The Host header names a host that this server does not serve",
        404: "The model is not served here",
        408: "The request body arrived too slowly",
        413: "The request body is too large",
        429: "Too many requests are queued; see Retry-After",
        500: "Internal server error",
        503: "The server is shutting down or has failed",
        504: "The request timed out",
    }.items()
}
Preprocess = Callable[[Any, ClientContext], GenerationJob]
# Describes each event instead of the stream: a keyword of OpenAPI 3.2, which earlier versions allow.
STREAM = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON; at the end [DONE]"}},
            "required": ["data"],
        }
    }
}


def error_responses(*statuses: int | str, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of these error statuses; `model` is the shape of the error."""
    return {status: {**ERRORS[status], "model": model} for status in statuses}


def generate_routes(service: Service) -> APIRouter:
    """Return the routes of /v1/chat/completions and /v1/completions."""
    router = APIRouter(tags=["generation"], route_class=JsonRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatCompletion, "content": STREAM}, **ERRORS},
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the assistant's next message of a conversation."""
        preprocess = service.preprocessor.preprocess_chat
        return await respond(service, request, body, "chatcmpl-", preprocess, ChatResponseBuilder)

    @router.post(
        "/v1/completions", response_model=None, responses={200: {"model": TextCompletion, "content": STREAM}, **ERRORS}
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Generate completions of one or more prompts."""
        preprocess = service.preprocessor.preprocess_completion
        return await respond(service, request, body, "cmpl-", preprocess, CompletionResponseBuilder)

    return router


async def respond_translated(
    service: Service,
    request: Request,
    translate: Callable[[], GenerationRequest],
    id_prefix: str,
    builder_type: Callable[..., ResponseBuilder],
) -> Response:
    """Return the response to a request of another API, which `translate` turns into one of OpenAI's."""
    body, preprocessor = await service.run_in_worker(translate), service.preprocessor
    is_chat = isinstance(body, ChatCompletionRequest)
    preprocess: Preprocess = preprocessor.preprocess_chat if is_chat else preprocessor.preprocess_completion
    return await respond(service, request, body, id_prefix, preprocess, builder_type)


async def respond(
    service: Service,
    request: Request,
    body: Any,
    id_prefix: str,
    preprocess: Preprocess,
    builder_type: Callable[..., ResponseBuilder],
) -> Response:
    """Return the response to one request, complete or as an event stream; cancel it if the client disconnects."""
    model = service.check_model(body.model)
    client = service.client_context(id_prefix, client_key(request.scope), body.cache_salt)

    async def generate() -> Response:
        deadline = asyncio.get_running_loop().time() + service.config.request_timeout
        async with asyncio.timeout_at(deadline):
            job, stream = await service.submit(preprocess, body, client, deadline)
        try:
            builder = builder_type(service.response_context, job, body, client.request_id, model)
            if not body.stream:
                return await complete_response(service, builder, stream)
            first = await first_items(stream, service.config.max_silence)
        except BaseException:
            stream.close()
            raise
        events = stream_events(service, builder, first, stream)
        attach = partial(write_directly, builder, stream)
        return EventStreamResponse(events, stream.close, attach, builder.media_type)

    return await cancel_on_disconnect(request.receive, generate())


async def complete_response(service: Service, builder: ResponseBuilder, stream: Stream) -> Response:
    """Wait for all output and return it in one response."""
    async with aclosing(stream.items()) as items:
        async for item in items:
            raise_if_failed(item)
            builder.add(item)
    service.log.write(builder.request_id, builder.model, builder.body, builder.choices)
    return JSONResponse(builder.response())


async def first_items(stream: Stream, max_silence: float | None) -> list[StreamItem] | None:
    """Wait for the first items, before headers are sent: a failure up to here gets its own HTTP status.

    Return None after `max_silence` seconds: prefill can take minutes, and clients give up without headers.
    """
    if not await stream.wait(max_silence):
        return None
    items = await stream.next_items()
    for item in items:
        raise_if_failed(item)
    return items


async def stream_events(
    service: Service, builder: ResponseBuilder, first: list[StreamItem] | None, stream: Stream
) -> AsyncGenerator[bytes, None]:
    """Yield the events of the response, and signs of life. An error at this stage is sent as the last event."""
    max_silence = service.config.max_silence
    try:
        if first is None:
            yield builder.early_events()
            async for sign in signs_of_life(stream, builder.sign_of_life, max_silence):
                yield sign
        items = await stream.next_items() if first is None else first
        while items:
            valid = [item for item in items if item.delta.finish_reason != "error"]
            events: list[bytes] = []
            try:
                events.extend(map(builder.events, valid))
            finally:  # if one fails, the client gets those before it
                yield b"".join(events)
            if len(valid) < len(items):
                for item in items:
                    raise_if_failed(item)
            async for sign in signs_of_life(stream, builder.sign_of_life, max_silence):
                yield sign
            items = await stream.next_items()
        service.log.write(builder.request_id, builder.model, builder.body, builder.choices)
    except Exception as exception:
        error = to_api_error(exception)
        if error.code == INTERNAL:
            LOG.exception("a stream failed")
        service.metrics.prometheus.failures.inc(error.code or "")
        yield builder.error_events(error)
    else:
        yield builder.end_of_stream
    finally:
        stream.close()


async def signs_of_life(
    stream: Stream, sign: Callable[[], bytes], max_silence: float | None
) -> AsyncGenerator[bytes, None]:
    """Yield a sign of life each time that `max_silence` seconds pass before the next items."""
    while not await stream.wait(max_silence):
        yield sign()


def write_directly(builder: ResponseBuilder, stream: Stream, connection: DirectConnection) -> None:
    """Write the chunks of a single-sequence stream to the connection without waking a task for each.

    Chunks of several sequences are better sent together. If the connection's buffer is full, items queue as usual.
    """
    if len(stream.requests) > 1:
        return

    def take(item: StreamItem) -> bool:
        if not connection.can_write():
            return False
        events = builder.events(item)
        if events:
            connection.write(events)
        return True

    stream.on_item = take


def raise_if_failed(item: StreamItem) -> None:
    """Raise an ApiError with the reason if the sequence has ended with an error."""
    if item.delta.finish_reason == "error":
        raise ApiError(400, f"generation cannot continue: {item.state.error}", code="cannot_go_on")
