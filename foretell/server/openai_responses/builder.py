"""Builds the responses of /v1/responses and their stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from foretell.server.dialects import RESPONSES
from foretell.server.openai_responses.input_items import Message, answer_message
from foretell.server.openai_responses.requests import ResponsesRequest
from foretell.server.output_blocks import BlockKind, BlockResponseBuilder, Event, OutputBlock
from foretell.server.response_builder import ResponseContext
from foretell.server.sse import typed_event

if TYPE_CHECKING:
    from foretell.server.errors import ApiError
    from foretell.server.openai.requests import GenerationRequest
    from foretell.server.preprocess import GenerationJob

ID_PREFIXES: dict[BlockKind, str] = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}
PARTS: dict[BlockKind, tuple[str, str]] = {  # type of the content part, and name of its events
    "content": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}
ARGUMENTS = "response.function_call_arguments"
Store = Callable[[dict[str, Any], Message], None]  # takes a finished response and the message that it is


class ResponsesBuilder(BlockResponseBuilder):
    """Builds the response of /v1/responses: items of text, reasoning and function calls."""

    dialect = RESPONSES

    def __init__(
        self,
        asked: ResponsesRequest,
        store: Store | None,
        context: ResponseContext,
        job: GenerationJob,
        body: GenerationRequest,
        request_id: str,
        model: str,
    ) -> None:
        """`asked` is the request before translation; `store` is None if the response is not to be stored."""
        super().__init__(context, job, body, request_id, model)
        self.asked, self._store = asked, store
        self._created = int(time.time())
        self._ids: list[str] = []  # of the items
        self._items: list[dict[str, Any]] = []  # complete ones
        self._sequence_number = 0

    def response(self) -> dict[str, Any]:
        """Return the complete response, and store it."""
        self._items = [self._item(block) for block in self.blocks]
        return self._finished_response()

    def _finished_response(self) -> dict[str, Any]:
        cut = self.choice.finish == "length"
        response = self._body("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "usage": self._usage(),
            **self.accounting(),
        }
        if self._store is not None:
            self._store(response, answer_message(self.choice))
        return response

    def _body(self, status: str) -> dict[str, Any]:
        """Return the response so far, with the request's settings."""
        asked, params = self.asked, self.choice.request.params
        reasoning = {} if asked.reasoning is None else asked.reasoning.model_dump()
        text = {} if asked.text is None else asked.text.model_dump(exclude_none=True)
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "store": self._store is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.functions,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": counts["total_tokens"],
        }

    def _item(self, block: OutputBlock, status: str | None = None) -> dict[str, Any]:
        """Return a block as an output item; without `status` it is a finished one."""
        while len(self._ids) <= block.index:
            self._ids.append(secrets.token_hex(12))
        if status is None:
            is_last = block is self.blocks[-1]
            status = "incomplete" if is_last and self.choice.finish == "length" else "completed"
        item = {"id": ID_PREFIXES[block.kind] + self._ids[block.index], "status": status}
        started = status == "in_progress"
        content = [] if started else [self._part(block, block.text)]
        match block.kind:
            case "content":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": content}
        text = "" if started else block.text
        return {**item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}

    def _part(self, block: OutputBlock, text: str) -> dict[str, Any]:
        if block.kind == "content":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def encode(self, event: Event) -> bytes:
        """Number an event and encode it."""
        numbered = {"type": event["type"], "sequence_number": self._sequence_number, **event}
        self._sequence_number += 1
        return typed_event(numbered)

    def opening(self) -> Iterable[Event]:
        return [self._response_event("created", "in_progress"), self._response_event("in_progress", "in_progress")]

    def _response_event(self, name: str, status: str) -> Event:
        return {"type": f"response.{name}", "response": self._body(status)}

    def block_start(self, block: OutputBlock) -> Iterable[Event]:
        item = self._item(block, "in_progress")
        events: list[Event] = [{"type": "response.output_item.added", "output_index": block.index, "item": item}]
        if block.kind != "call":
            part = {**self._place(block), "content_index": 0, "part": self._part(block, "")}
            events.append({"type": "response.content_part.added", **part})
        return events

    def block_delta(self, block: OutputBlock, text: str) -> Iterable[Event]:
        return [self._text_event(block, "delta", {"delta": text})]

    def block_stop(self, block: OutputBlock) -> Iterable[Event]:
        item = self._item(block)
        self._items.append(item)
        done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        if block.kind == "call":
            fields = {"name": block.name, "arguments": block.text}
            return [self._text_event(block, "done", fields), done]
        part = {**self._place(block), "content_index": 0, "part": self._part(block, block.text)}
        text = self._text_event(block, "done", {"text": block.text})
        return [text, {"type": "response.content_part.done", **part}, done]

    def closing(self) -> Iterable[Event]:
        response = self._finished_response()
        return [{"type": f"response.{response['status']}", "response": response}]

    def _place(self, block: OutputBlock) -> dict[str, Any]:
        item_id = ID_PREFIXES[block.kind] + self._ids[block.index]
        return {"item_id": item_id, "output_index": block.index}

    def _text_event(self, block: OutputBlock, name: str, fields: dict[str, Any]) -> Event:
        """Return the event for text or arguments of a block."""
        if block.kind == "call":
            return {"type": f"{ARGUMENTS}.{name}", **self._place(block), **fields}
        event = {"type": f"{PARTS[block.kind][1]}.{name}", **self._place(block), "content_index": 0, **fields}
        return event | ({"logprobs": []} if block.kind == "content" else {})

    def error_events(self, error: ApiError) -> bytes:
        """Return the event of a failed response."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._body("failed") | {"error": {"code": code, "message": error.message}}
        return self.encode({"type": "response.failed", "response": failed})
