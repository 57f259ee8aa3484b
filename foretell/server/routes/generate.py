"""The endpoints that write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretell.server.errors import INTERNAL, ApiError, failure_of
from foretell.server.http_protocol import DirectConnection
from foretell.server.json_body import JsonRoute
from foretell.server.middleware import shown_key
from foretell.server.openai.chat_requests import ChatBody
from foretell.server.openai.chat_response import ChatResponseBuilder
from foretell.server.openai.completion_response import CompletionResponseBuilder
from foretell.server.openai.requests import CompletionBody
from foretell.server.openai.response_builder import ResponseBuilder
from foretell.server.openai.responses import ChatCompletion, ErrorReply, TextCompletion
from foretell.server.preprocess import ClientContext, GenerationJob
from foretell.server.service import Service
from foretell.server.sse import DONE, EventStream, event, unless_gone

if TYPE_CHECKING:
    from foretell.engine.streams import Stream, StreamItem

LOG = logging.getLogger("foretell")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": words}
    for status, words in {
        400: "A field that is wrong or not supported; `param` names it",
        401: "No key, or a wrong one",
        403: "Asked for by a name that this server does not answer to",
        404: "A model that is not served here",
        408: "The body came too slowly",
        413: "The body is too large",
        429: "Too many texts wait; see Retry-After",
        500: "A fault of the server",
        503: "The server is stopping or has failed",
        504: "The request took too long",
    }.items()
}
# Of each event, not of the whole stream: OpenAPI 3.2's keyword, which earlier versions let through.
STREAM = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON; at the end [DONE]"}},
            "required": ["data"],
        }
    }
}


def some(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of these errors."""
    return {status: ERRORS[status] for status in statuses}


def writing_routes(service: Service) -> APIRouter:
    """/v1/chat/completions and /v1/completions."""
    router = APIRouter(tags=["writing"], route_class=JsonRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatCompletion, "content": STREAM}, **ERRORS},
    )
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, body, "chatcmpl", service.desk.chat, ChatResponseBuilder)

    @router.post(
        "/v1/completions", response_model=None, responses={200: {"model": TextCompletion, "content": STREAM}, **ERRORS}
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        return await respond(service, request, body, "cmpl", service.desk.completion, CompletionResponseBuilder)

    return router


async def respond(
    service: Service,
    request: Request,
    body: Any,
    kind: str,
    make: Callable[[Any, ClientContext], GenerationJob],
    shape: type[Any],
) -> Response:
    """The reply to one request, whole or as a stream; it is broken off when the caller goes away."""
    model = service.check_model(body.model)
    caller = service.caller(kind, shown_key(request.scope), body.cache_salt)

    async def begin() -> Response:
        service.engine.check_open(1 + service.arriving)  # before any work is put into it
        deadline = asyncio.get_running_loop().time() + service.config.request_timeout
        async with asyncio.timeout_at(deadline):
            job = await service.settle(make, body, caller)
            reply: ResponseBuilder = shape(service.house, job, body, caller.name, model)
            stream = await service.open(job, deadline, patient=not body.stream)
        if not body.stream:
            return await whole(service, reply, stream)
        told = events(service, reply, await first_of(stream), stream)
        return EventStream(told, stream.close, partial(shorten, reply, stream))

    return await unless_gone(request.receive, begin())


async def whole(service: Service, reply: ResponseBuilder, stream: Stream) -> Response:
    """The reply in one."""
    async with aclosing(stream.items()) as pieces:
        async for piece in pieces:
            check(piece)
            reply.add(piece)
    service.log.write(reply.name, reply.model, reply.body, reply.answers)
    return JSONResponse(reply.whole())


async def first_of(stream: Stream) -> list[StreamItem]:
    """The first pieces: what fails before them, or with them, gets a status of its own."""
    try:
        pieces = await stream.next_items()
        for piece in pieces:
            check(piece)
    except BaseException:
        stream.close()
        raise
    return pieces


async def events(
    service: Service, reply: ResponseBuilder, pieces: list[StreamItem], stream: Stream
) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events; what fails now is told as the last of them."""
    try:
        while pieces:
            sound = [piece for piece in pieces if piece.delta.finish_reason != "error"]
            yield b"".join([reply.events(piece) for piece in sound])
            for piece in pieces if len(sound) < len(pieces) else ():
                check(piece)
            pieces = await stream.next_items()
        service.log.write(reply.name, reply.model, reply.body, reply.answers)
    except Exception as error:
        failure = failure_of(error)
        if failure.code == INTERNAL:
            LOG.exception("a stream failed")
        service.metrics.instruments.failures.add(failure.code or "")
        yield event(failure.body())
    finally:
        stream.close()
    yield DONE


def shorten(reply: ResponseBuilder, stream: Stream, connection: DirectConnection) -> None:
    """Have the words of a text written as they come, and no task woken for them. Several texts are better sent at once,
    and what comes to a slow reader waits its turn as ever."""
    if len(stream.requests) > 1:
        return

    def take(piece: StreamItem) -> bool:
        if not connection.has_room():
            return False
        told = reply.events(piece)
        if told:
            connection.write(told)
        return True

    stream.on_item = take


def check(piece: StreamItem) -> None:
    """A text that could not go on is told as a failure, with its reason."""
    if piece.delta.finish_reason == "error":
        raise ApiError(400, f"the text could not go on: {piece.state.error}", code="cannot_go_on")
