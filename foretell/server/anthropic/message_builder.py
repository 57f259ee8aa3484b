"""Builds Anthropic's messages and their stream of events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretell.server.dialects import ANTHROPIC
from foretell.server.output_blocks import BlockResponseBuilder, Event, OutputBlock

PING: Event = {"type": "ping"}
UNSIGNED = "unsigned"  # clients send thinking back only with a signature; here it is not verified
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessageBuilder(BlockResponseBuilder):
    """Builds the response of /v1/messages: content blocks of text, thinking and tool calls."""

    dialect = ANTHROPIC

    def response(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        message = self._message([_block_body(block) for block in self.blocks])
        return {**message, **self._stop(), "usage": self._usage(), **self.accounting()}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self) -> dict[str, Any]:
        """Return why the message has ended."""
        stop = self.matched_stop
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.choice.openai_finish_reason)
        if reason is None:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Return Anthropic's token counts: those of the prefix cache are not part of `input_tokens`."""
        counts = self.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def opening(self) -> Iterable[Event]:
        message = {**self._message([]), "usage": self._usage()}
        return [{"type": "message_start", "message": message}, PING]

    def sign_of_life(self) -> bytes:
        return self.encode(PING)

    def block_start(self, block: OutputBlock) -> Iterable[Event]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _empty_block(block)}]

    def block_delta(self, block: OutputBlock, text: str) -> Iterable[Event]:
        kind, name = DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}]

    def block_stop(self, block: OutputBlock) -> Iterable[Event]:
        events: list[Event] = []
        if block.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": UNSIGNED}
            events.append({"type": "content_block_delta", "index": block.index, "delta": signature})
        return [*events, {"type": "content_block_stop", "index": block.index}]

    def closing(self) -> Iterable[Event]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage(), **self.accounting()}
        return [delta, {"type": "message_stop"}]


def _empty_block(block: OutputBlock) -> dict[str, Any]:
    match block.kind:
        case "content":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _block_body(block: OutputBlock) -> dict[str, Any]:
    """Return a complete content block."""
    empty = _empty_block(block)
    match block.kind:
        case "content":
            return empty | {"text": block.text}
        case "reasoning":
            return empty | {"thinking": block.text, "signature": UNSIGNED}
    return empty | {"input": block.arguments()}
