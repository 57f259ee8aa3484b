"""llama.cpp's own endpoints, as far as editors use them: /completion, /infill, /props, /slots, /apply-template."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foretell.errors import RequestError
from foretell.server.chat_template import apply_chat_template
from foretell.server.errors import INTERNAL, to_api_error
from foretell.server.json_body import JsonRoute
from foretell.server.llama_cpp.requests import (
    ApplyTemplateRequest,
    InfillRequest,
    LlamaCompletionRequest,
)
from foretell.server.llama_cpp.response_builder import LlamaResponseBuilder
from foretell.server.middleware import client_key
from foretell.server.openai.chat_requests import TokenizeRequest
from foretell.server.openai.requests import CompletionRequest
from foretell.server.routes.generate import ERRORS, error_responses, raise_if_failed, signs_of_life
from foretell.server.sse import COMMENT, EventStreamResponse, cancel_on_disconnect, sse_event
from foretell.version import VERSION

if TYPE_CHECKING:
    from foretell.engine.streams import Stream, StreamItem
    from foretell.server.preprocess import ClientContext, GenerationJob, RequestPreprocessor
    from foretell.server.service import Service

LOG = logging.getLogger("foretell")
ANY: dict[str, Any] = {"description": "llama.cpp's fields"}
OUTPUT: dict[str, Any] = {**ANY, "content": {"text/event-stream": {}}}  # besides JSON


def llama_cpp_routes(service: Service) -> APIRouter:
    """Return the routes in llama.cpp's shapes."""
    router = APIRouter(tags=["llama.cpp"], route_class=JsonRoute)
    _add_generation_routes(router, service)
    _add_template_route(router, service)
    _add_state_routes(router, service)
    return router


def _add_generation_routes(router: APIRouter, service: Service) -> None:
    @router.post("/completion", response_model=None, responses={200: OUTPUT, **ERRORS})
    async def completion(body: LlamaCompletionRequest, request: Request) -> Response:
        """Generate a completion, in llama.cpp's shape."""
        return await _respond(service, request, body)

    @router.post("/infill", response_model=None, responses={200: OUTPUT, **ERRORS})
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Generate the text of a gap by the model's fill-in-the-middle tokens, in llama.cpp's shape."""
        return await _respond(service, request, body)


def _add_template_route(router: APIRouter, service: Service) -> None:
    @router.post("/apply-template", response_model=None, responses={200: ANY, **error_responses(400, 401, 403, 404)})
    async def apply_template(body: ApplyTemplateRequest) -> Response:
        """Return the prompt of a chat as text."""
        service.check_model(body.model)
        return await service.run_in_worker(_apply_template, service.preprocessor, body)


def _apply_template(preprocessor: RequestPreprocessor, body: ApplyTemplateRequest) -> Response:
    fields = {name: getattr(body, name) for name in ("messages", "tools", "add_generation_prompt")}
    chat = TokenizeRequest.model_construct(**fields, chat_template_kwargs=body.chat_template_kwargs)
    return JSONResponse({"prompt": apply_chat_template(preprocessor.tokenizer, chat, body.tools)})


def _add_state_routes(router: APIRouter, service: Service) -> None:
    slots = service.engine_config.max_num_seqs

    @router.get("/props", response_model=None, responses={200: ANY, **error_responses(401, 403)})
    async def props() -> dict[str, Any]:
        """Describe the model and the default settings, in llama.cpp's shape."""
        tokenizer, preprocessor = service.preprocessor.tokenizer, service.preprocessor
        context = preprocessor.max_model_len
        defaults = dict(service.assembly.sampling_defaults)
        bos, eos = tokenizer.bos_id, min(tokenizer.end_ids, default=None)
        return {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": context,
                "params": defaults,
            },
            "total_slots": slots,
            "model_path": service.engine_config.model,
            "model_alias": service.model_names[0],
            "chat_template": tokenizer.chat_template or "",
            "bos_token": "" if bos is None else tokenizer.token_text(bos),
            "eos_token": "" if eos is None else tokenizer.token_text(eos),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"foretell-{VERSION}",
        }

    @router.get("/slots", response_model=None, responses={200: ANY, **error_responses(401, 403)})
    async def slot_states() -> list[dict[str, Any]]:
        """Report how many sequences run, as llama.cpp's slots; it has no prompts or outputs."""
        service.engine.deliver_pending()
        running, speculative = service.engine.load.running, bool(service.assembly.engine.drafter.drafters)
        context = service.preprocessor.max_model_len
        return [
            {"id": i, "n_ctx": context, "speculative": speculative, "is_processing": i < running} for i in range(slots)
        ]


async def _respond(service: Service, request: Request, body: LlamaCompletionRequest | InfillRequest) -> Response:
    """Return the response to one request, complete or as an event stream; cancel it if the client disconnects."""
    model = service.check_model(body.model)
    client = service.client_context("cmpl-", client_key(request.scope), body.cache_salt)

    async def generate() -> Response:
        deadline = asyncio.get_running_loop().time() + service.config.request_timeout
        async with asyncio.timeout_at(deadline):
            job, stream = await service.submit(
                lambda completion, client: _preprocess(service.preprocessor, body, client),
                body.as_completion("", 1, 1),
                client,
                deadline,
            )
        builder = LlamaResponseBuilder(job, body, model, service.preprocessor.tokenizer)
        if body.stream:
            return EventStreamResponse(_events(service, builder, stream, client), stream.close)
        try:
            async with aclosing(stream.items()) as items:
                async for item in items:
                    raise_if_failed(item)
                    builder.add(item)
                    if builder.finished:
                        break
        finally:
            stream.close()
        service.log.write(client.request_id, model, body, builder.choices)
        return JSONResponse(builder.complete())

    return await cancel_on_disconnect(request.receive, generate())


def _preprocess(
    preprocessor: RequestPreprocessor, body: LlamaCompletionRequest | InfillRequest, client: ClientContext
) -> GenerationJob:
    """Build the engine request of a body."""
    prompt = _infill_prompt(preprocessor, body) if isinstance(body, InfillRequest) else _prompt(preprocessor, body)
    limit, context = preprocessor.config.unstreamed_max_tokens, preprocessor.max_model_len
    completion: CompletionRequest = body.as_completion(prompt, limit, context)
    if isinstance(body, InfillRequest):
        completion.stop_token_ids = list(preprocessor.fim_tokens("input_prefix").ends)
    return preprocessor.preprocess_completion(completion, client)


def _prompt(preprocessor: RequestPreprocessor, body: LlamaCompletionRequest) -> str | list[int]:
    """Return the prompt; in a list, strings between token ids are encoded without special tokens."""
    if isinstance(body.prompt, str):
        return body.prompt
    if len(body.prompt) > 1 and all(isinstance(part, str) for part in body.prompt):
        raise RequestError("prompt", "with several strings would be several prompts; send one request for each")
    preprocessor.check_length("prompt", "".join(part for part in body.prompt if isinstance(part, str)))
    tokens: list[int] = []
    for part in body.prompt:
        tokens += preprocessor.tokenizer.encode(part, add_special=False) if isinstance(part, str) else [part]
    return tokens


def _infill_prompt(preprocessor: RequestPreprocessor, body: InfillRequest) -> list[int]:
    before = body.input_prefix + (body.prompt or "")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    for field, text in (("input_prefix", before), ("input_suffix", body.input_suffix)):
        preprocessor.check_length(field, text)
    if sum(len(text) for _, text in files) > MAX_EXTRA_CONTEXTS * preprocessor.max_model_len:
        raise RequestError("input_extra", "is many times as long as the context; send less of the other files")
    return preprocessor.fim_prompt("input_prefix", before, body.input_suffix, files, room=max(0, body.n_predict or 0))


MAX_EXTRA_CONTEXTS = 64  # characters of other files per token of context: they are encoded to see how many fit


async def _events(
    service: Service, builder: LlamaResponseBuilder, stream: Stream, client: ClientContext
) -> AsyncGenerator[bytes, None]:
    """Yield the response as server-sent events; the last one, or an error, ends the stream."""
    try:
        items: list[StreamItem] | None = None
        while not builder.finished and items != []:
            async for sign in signs_of_life(stream, lambda: COMMENT, service.config.max_silence):
                yield sign
            items = await stream.next_items()
            for item in items:
                raise_if_failed(item)
                yield builder.add(item)
                if builder.finished:
                    break
        service.log.write(client.request_id, builder.model, builder.body, builder.choices)
    except Exception as exception:
        error = to_api_error(exception)
        if error.code == INTERNAL:
            LOG.exception("a stream failed")
        service.metrics.prometheus.failures.inc(error.code or "")
        yield sse_event(error.body())
    finally:
        stream.close()
