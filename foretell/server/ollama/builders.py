"""Builds the responses of /api/chat and /api/generate, complete and as lines of JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from foretell.server.dialects import OLLAMA
from foretell.server.output_blocks import BlockResponseBuilder, Event, OutputBlock
from foretell.server.sse import json_line

NANOSECONDS = 1_000_000_000  # per second


class OllamaBuilder(BlockResponseBuilder):
    """Builds Ollama's responses: text and reasoning as they arrive, each tool call once it is complete."""

    media_type = "application/x-ndjson"
    dialect = OLLAMA

    @abstractmethod
    def output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a response that hold the output."""

    def encode(self, event: Event) -> bytes:
        return json_line(event)

    def response(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        calls = [_call_body(block, i) for i, block in enumerate(self._calls)]
        return self._line(self.output(self.choice.content, self.choice.reasoning, calls)) | self._end()

    def opening(self) -> Iterable[Event]:
        return []

    def early_events(self) -> bytes:
        return self.sign_of_life()

    def sign_of_life(self) -> bytes:
        """Return a line without text: JSON lines have no comments."""
        return self.encode(self._line(self.output("", "", [])))

    def block_start(self, block: OutputBlock) -> Iterable[Event]:
        return []

    def block_delta(self, block: OutputBlock, text: str) -> Iterable[Event]:
        if block.kind == "content":
            return [self._line(self.output(text, "", []))]
        return [self._line(self.output("", text, []))] if block.kind == "reasoning" else []

    def block_stop(self, block: OutputBlock) -> Iterable[Event]:
        if block.kind != "call":
            return []
        return [self._line(self.output("", "", [_call_body(block, self._calls.index(block))]))]

    def closing(self) -> Iterable[Event]:
        return [self._line(self.output("", "", [])) | self._end()]

    @property
    def _calls(self) -> list[OutputBlock]:
        return [block for block in self.blocks if block.kind == "call"]

    def _line(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), **fields, "done": False}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line: why the output ended, counts, and times in nanoseconds."""
        counts = self.usage()
        return {
            "done": True,
            "done_reason": "length" if self.choice.finish == "length" else "stop",
            "prompt_eval_count": counts["prompt_tokens"],
            "eval_count": counts["completion_tokens"],
            **self._durations(),
            **self.accounting(),
        }

    def _durations(self) -> dict[str, int]:
        state = self.choice.state
        assert state is not None, "the output is complete"
        times = state.timings
        started = times.added if times.started is None else times.started
        first = started if times.first_token is None else times.first_token
        finished = first if times.finished is None else times.finished
        seconds = {
            "total_duration": finished - times.added,
            "load_duration": 0.0,  # the model is loaded when the server starts
            "prompt_eval_duration": first - started,
            "eval_duration": finished - first,
        }
        return {name: round(each * NANOSECONDS) for name, each in seconds.items()}


class OllamaChatBuilder(OllamaBuilder):
    """Builds the response of /api/chat."""

    def output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerateBuilder(OllamaBuilder):
    """Builds the response of /api/generate."""

    def output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


def now() -> str:
    """Return the time in RFC 3339, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call_body(block: OutputBlock, index: int) -> dict[str, Any]:
    function = {"index": index, "name": block.name, "arguments": block.arguments()}
    return {"id": block.call_id, "function": function}
