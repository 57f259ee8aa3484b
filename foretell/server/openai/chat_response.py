"""Replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foretell.server.choice_state import ChoiceState
from foretell.server.openai.chat_requests import ChatBody
from foretell.server.openai.response_builder import ResponseBuilder
from foretell.server.parsers.base import Kind, OutputPart
from foretell.server.sse import BLANK

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.openai.response_builder import ResponseContext
    from foretell.server.preprocess import GenerationJob

SPOKEN: dict[Kind, str] = {"content": "content", "reasoning": "reasoning_content"}  # and what chunks call it


class ChatResponseBuilder(ResponseBuilder):
    """Messages: words, thoughts and calls of tools."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, house: ResponseContext, job: GenerationJob, body: ChatBody, name: str, model: str) -> None:
        super().__init__(house, job, body, name, model)
        self.tells_logprobs = bool(body.logprobs)
        self.tells_thoughts = body.include_reasoning is not False

    def choice(self, answer: ChoiceState) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": self._message(answer),
            "logprobs": self.logprobs.chat(answer.logprobs) if self.tells_logprobs else None,
            "finish_reason": answer.finish_reason,
            **self.told(answer),
        }

    def _message(self, answer: ChoiceState) -> dict[str, Any]:
        content = answer.content if answer.content or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self.tells_thoughts:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.as_json() for call in answer.calls]
        return message

    def spoken(self, kind: Kind) -> dict[str, Any] | None:
        if kind == "content" or (kind == "reasoning" and self.tells_thoughts):
            return {"delta": {SPOKEN[kind]: BLANK}, "logprobs": None, "finish_reason": None}
        return None

    def parts(self, answer: ChoiceState, piece: StreamItem, said: list[OutputPart]) -> Iterator[dict[str, Any]]:
        calls = len(answer.calls) - sum(each.kind == "call" for each in said)
        deltas: list[dict[str, Any]] = []
        for each in said:
            calls += each.kind == "call"
            deltas += self._delta(answer, each, calls - 1)
        if piece.is_first:
            deltas[:1] = [{"role": "assistant", **(deltas[0] if deltas else {"content": ""})}]
        elif not deltas and (self.tells_logprobs or self.tells_tokens):
            deltas = [{}]
        more = self._more(answer, piece)
        for delta in deltas:
            yield {"delta": delta, "logprobs": None, "finish_reason": None, **more}
            more = {}  # what is told of a piece's tokens goes with its first chunk
        if answer.finish is not None:
            yield {"delta": {}, "logprobs": None, "finish_reason": answer.finish_reason}

    def _more(self, answer: ChoiceState, piece: StreamItem) -> dict[str, Any]:
        told = self.told(answer, piece)
        if self.tells_logprobs:
            told["logprobs"] = self.logprobs.chat(piece.delta.logprobs or ())
        return told

    def _delta(self, answer: ChoiceState, said: OutputPart, call: int) -> list[dict[str, Any]]:
        if said.kind == "reasoning" and not self.tells_thoughts:
            return []
        if said.kind in SPOKEN:
            return [{SPOKEN[said.kind]: said.text}]
        if said.kind == "call":
            function = {"name": said.text, "arguments": ""}
            return [
                {"tool_calls": [{"index": call, "id": answer.calls[call].id, "type": "function", "function": function}]}
            ]
        return [{"tool_calls": [{"index": call, "function": {"arguments": said.text}}]}]
