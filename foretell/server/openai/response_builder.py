"""Builds OpenAI responses from the engine's output: complete, and as chunks of an event stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.engine.detokenizer import decoder_for
from foretell.server import usage
from foretell.server.choice_state import ChoiceState
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import CompletionRequest, GenerationRequest
from foretell.server.parsers.base import OutputPart, PartKind
from foretell.server.response_builder import ResponseBuilder, ResponseContext
from foretell.server.sse import DONE, PLACEHOLDER, ChunkTemplate, sse_event
from foretell.server.token_details import LogprobFormatter, LogprobRow, TokenDetailFormatter
from foretell.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.preprocess import GenerationJob
    from foretell.types import TokenLogprob


class OpenAIResponseBuilder(ResponseBuilder):
    """Builds responses with OpenAI's choices and chunks."""

    end_of_stream = DONE

    object_type: str  # OpenAI's `object` of a complete response
    chunk_type: str  # OpenAI's `object` of a chunk
    returns_logprobs: bool

    def __init__(
        self, context: ResponseContext, job: GenerationJob, body: GenerationRequest, request_id: str, model: str
    ) -> None:
        super().__init__(context, job, body, request_id, model)
        self.logprobs = LogprobFormatter(context.tokenizer, bool(body.return_tokens_as_token_ids))
        self._detail_formatters: list[TokenDetailFormatter] = []
        if self.returns_token_details:
            self._detail_formatters = [context.token_detail_formatter(choice.request, body) for choice in self.choices]
        self._templates: dict[tuple[int, PartKind], ChunkTemplate] = {}  # by choice index and kind of text
        self._started: set[int] = set()  # indices of choices whose first chunk was built
        self._header = {
            "id": request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }

    def add(self, item: StreamItem) -> None:
        """Add an item to a response that is sent complete."""
        choice = self.choice_state(item)
        choice.add(item)
        if self.returns_token_details:
            self._detail_formatters[choice.index].append(item)

    def response(self) -> dict[str, Any]:
        """Return the body of the complete response."""
        return {
            **self._header,
            "object": self.object_type,
            "choices": [self.choice_body(choice) for choice in self.choices],
            "usage": self.usage(),
            **self.accounting(),
        }

    @abstractmethod
    def choice_body(self, choice: ChoiceState) -> dict[str, Any]:
        """Return one finished choice of the complete response."""

    @abstractmethod
    def chunk_choices(self, choice: ChoiceState, item: StreamItem, parts: list[OutputPart]) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks for an item; the last one carries the finish_reason."""

    @abstractmethod
    def template_choice(self, kind: PartKind) -> dict[str, Any] | None:
        """Return a chunk's choice with PLACEHOLDER as its text; None if parts of this kind need more than text."""

    def events(self, item: StreamItem) -> bytes:
        """Return the server-sent events for an item."""
        choice = self.choice_state(item)
        parts = choice.add(item)
        if len(parts) == 1 and self.text_only and not item.is_first and choice.finish is None:
            kind = parts[0].kind
            template = self._templates.get((choice.index, kind)) or self._make_template(choice.index, kind)
            if template is not None:
                return template.event(parts[0].text)
        return b"".join([sse_event(chunk) for chunk in self._chunks(choice, item, parts)])

    @cached_property
    def text_only(self) -> bool:
        """Return whether chunks after the first and before the last carry nothing but text."""
        body, options = self.body, self.body.stream_options
        usage_per_chunk = options is not None and bool(options.continuous_usage_stats)
        extras = (
            self.returns_logprobs,
            self.returns_token_details,
            body.timings_per_token,
            body.return_progress,
            usage_per_chunk,
        )
        return not any(extras) and not self.job.prompt_only

    def _make_template(self, index: int, kind: PartKind) -> ChunkTemplate | None:
        choice = self.template_choice(kind)
        if choice is None:
            return None
        template = self._templates[index, kind] = ChunkTemplate(self._chunk([{"index": index, **choice}]))
        return template

    def _chunks(self, choice: ChoiceState, item: StreamItem, parts: list[OutputPart]) -> Iterator[dict[str, Any]]:
        for body in self.chunk_choices(choice, item, parts):
            chunk = self._chunk([{"index": choice.index, **body}])
            if body.get("finish_reason") is not None and self.finished and not self.body.include_usage:
                chunk |= self.accounting()
            elif self.body.timings_per_token:
                chunk["timings"] = usage.timings([choice])
            if self.body.return_progress and choice.index not in self._started:
                self._started.add(choice.index)
                chunk["prompt_progress"] = usage.prompt_progress(choice)
            yield chunk
        if self.finished and self.body.include_usage:
            yield {**self._chunk([]), "usage": self.usage(), **self.accounting()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._header, "object": self.chunk_type, "choices": choices}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage() if options.continuous_usage_stats else None
        return chunk

    @property
    def returns_token_details(self) -> bool:
        """Return whether the request asks for origins, details or rounds of its tokens."""
        body = self.body
        return bool(body.return_token_origin or body.return_token_details or body.return_rounds)

    def token_details(self, choice: ChoiceState, item: StreamItem | None = None) -> dict[str, Any]:
        """Return the token details of one item, or of the complete choice; empty if not requested."""
        if not self.returns_token_details:
            return {}
        formatter = self._detail_formatters[choice.index]
        return formatter.collected if item is None else formatter.format(item)


DELTA_FIELDS: dict[PartKind, str] = {"content": "content", "reasoning": "reasoning_content"}  # text fields of a delta


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/chat/completions: messages with content, reasoning and tool calls."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def __init__(
        self, context: ResponseContext, job: GenerationJob, body: ChatCompletionRequest, request_id: str, model: str
    ) -> None:
        super().__init__(context, job, body, request_id, model)
        self.returns_logprobs = bool(body.logprobs)
        self.returns_reasoning = body.include_reasoning is not False

    def choice_body(self, choice: ChoiceState) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": self.logprobs.chat(choice.logprobs) if self.returns_logprobs else None,
            "finish_reason": choice.openai_finish_reason,
            **self.token_details(choice),
        }

    def _message(self, choice: ChoiceState) -> dict[str, Any]:
        content = choice.content if choice.content or not choice.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self.returns_reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [call.as_json() for call in choice.tool_calls]
        return message

    def template_choice(self, kind: PartKind) -> dict[str, Any] | None:
        if kind == "content" or (kind == "reasoning" and self.returns_reasoning):
            return {"delta": {DELTA_FIELDS[kind]: PLACEHOLDER}, "logprobs": None, "finish_reason": None}
        return None

    def chunk_choices(self, choice: ChoiceState, item: StreamItem, parts: list[OutputPart]) -> Iterator[dict[str, Any]]:
        num_calls = len(choice.tool_calls) - sum(part.kind == "call" for part in parts)
        deltas: list[dict[str, Any]] = []
        for part in parts:
            num_calls += part.kind == "call"
            deltas += self._part_deltas(choice, part, num_calls - 1)
        if item.is_first:
            deltas[:1] = [{"role": "assistant", **(deltas[0] if deltas else {"content": ""})}]
        elif not deltas and (self.returns_logprobs or self.returns_token_details):
            deltas = [{}]
        extras = self._extras(choice, item)
        for delta in deltas:
            yield {"delta": delta, "logprobs": None, "finish_reason": None, **extras}
            extras = {}  # the item's token details go with its first chunk
        if choice.finish is not None:
            yield {"delta": {}, "logprobs": None, "finish_reason": choice.openai_finish_reason}

    def _extras(self, choice: ChoiceState, item: StreamItem) -> dict[str, Any]:
        extras = self.token_details(choice, item)
        if self.returns_logprobs:
            extras["logprobs"] = self.logprobs.chat(item.delta.logprobs or ())
        return extras

    def _part_deltas(self, choice: ChoiceState, part: OutputPart, call_index: int) -> list[dict[str, Any]]:
        """Return OpenAI's deltas for one part; none for reasoning that is not returned."""
        if part.kind == "reasoning" and not self.returns_reasoning:
            return []
        if part.kind in DELTA_FIELDS:
            return [{DELTA_FIELDS[part.kind]: part.text}]
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            call_id = choice.tool_calls[call_index].id
            call = {"index": call_index, "id": call_id, "type": "function", "function": function}
            return [{"tool_calls": [call]}]
        return [{"tool_calls": [{"index": call_index, "function": {"arguments": part.text}}]}]


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/completions, with the prompt in front of the text if it is echoed."""

    object_type = chunk_type = "text_completion"

    def __init__(
        self, context: ResponseContext, job: GenerationJob, body: CompletionRequest, request_id: str, model: str
    ) -> None:
        super().__init__(context, job, body, request_id, model)
        self.returns_logprobs = body.logprobs is not None
        self._offsets = [0] * len(self.choices)  # characters of each choice with logprobs so far
        with_logprobs = self.choices if self.returns_logprobs else []
        self._decoders = [decoder_for(choice.request, context.tokenizer) for choice in with_logprobs]

    def choice_body(self, choice: ChoiceState) -> dict[str, Any]:
        rows = [*self._prompt_rows(choice), *self._output_rows(choice, choice.tokens, choice.logprobs)]
        return {
            "index": choice.index,
            "text": self._echo(choice) + ("" if self.job.prompt_only else choice.content),
            "logprobs": self._logprobs(choice, rows),
            "finish_reason": self._finish_reason(choice),
            **self.token_details(choice),
        }

    def template_choice(self, kind: PartKind) -> dict[str, Any] | None:
        return {"text": PLACEHOLDER, "logprobs": None, "finish_reason": None}

    def chunk_choices(self, choice: ChoiceState, item: StreamItem, parts: list[OutputPart]) -> Iterator[dict[str, Any]]:
        text = "" if self.job.prompt_only else "".join(part.text for part in parts)
        rows = self._output_rows(choice, list(item.delta.tokens), list(item.delta.logprobs or ()))
        if item.is_first:
            text, rows = self._echo(choice) + text, [*self._prompt_rows(choice), *rows]
        if text or self.returns_logprobs or self.returns_token_details:
            details = self.token_details(choice, item)
            yield {"text": text, "logprobs": self._logprobs(choice, rows), "finish_reason": None, **details}
        if choice.finish is not None:
            yield {"text": "", "logprobs": None, "finish_reason": self._finish_reason(choice)}

    def _finish_reason(self, choice: ChoiceState) -> str:
        return "length" if self.job.prompt_only else choice.openai_finish_reason

    def _echo(self, choice: ChoiceState) -> str:
        return self.job.prompts[choice.index // choice.request.params.n] if self.job.prompts else ""

    def _output_rows(self, choice: ChoiceState, tokens: list[int], logprobs: list[TokenLogprob]) -> list[LogprobRow]:
        if not self.returns_logprobs or self.job.prompt_only:
            return []
        decoder = self._decoders[choice.index]
        return [(token, row, len(decoder.push([token]))) for token, row in zip(tokens, logprobs, strict=True)]

    def _prompt_rows(self, choice: ChoiceState) -> list[LogprobRow]:
        """Return the rows of an echoed prompt; its first token has no logprob."""
        if not self.job.prompts or not self.returns_logprobs:
            return []
        tokens, tokenizer = choice.request.prompt, self.context.tokenizer
        decoder = StreamDecoder(tokenizer, skip_special=False)
        lengths = [len(decoder.push([token])) for token in tokens]
        lengths[-1] += len(decoder.flush())
        if tokens[0] == tokenizer.bos_id and not self._echo(choice).startswith(tokenizer.token_text(tokens[0])):
            lengths[0] = 0  # BOS was added by the tokenizer and is not part of the prompt text
        logprobs = [choice.prompt_logprobs.get(position) for position in range(len(tokens))]
        return list(zip(tokens, logprobs, lengths, strict=True))

    def _logprobs(self, choice: ChoiceState, rows: list[LogprobRow]) -> dict[str, Any] | None:
        if not self.returns_logprobs:
            return None
        logprobs = self.logprobs.completion(rows, self._offsets[choice.index])
        self._offsets[choice.index] += sum(length for _, _, length in rows)
        return logprobs
