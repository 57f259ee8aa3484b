"""Replies: whole, and as chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.engine.detokenizer import decoder_for
from foretell.server import usage as accounts
from foretell.server.choice_state import ChoiceState
from foretell.server.metrics import PlainSeconds, unknown
from foretell.server.openai.chat_requests import ChatBody
from foretell.server.openai.requests import CompletionBody, Generation
from foretell.server.parsers.base import Kind, OutputPart
from foretell.server.sse import BLANK, ChunkTemplate, event
from foretell.server.token_details import LogprobWriter, TokenDetailWriter
from foretell.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.preprocess import GenerationJob, RequestPreprocessor
    from foretell.server.token_details import Row
    from foretell.tokenizer import Tokenizer
    from foretell.types import Request, TokenLogprob


@dataclass(frozen=True)
class ResponseContext:
    """What every reply of a server has in common."""

    desk: RequestPreprocessor
    fingerprint: str
    longest_draft: int
    records: str  # none, summary or detailed
    plain_seconds: PlainSeconds = unknown

    @property
    def tokenizer(self) -> Tokenizer:
        return self.desk.tokenizer

    def teller(self, request: Request, body: Generation) -> TokenDetailWriter:
        """For a request that wants to know of its tokens."""
        arms = self.desk.assembly.engine.drafter.drafters
        sure = frozenset(name for name, arm in arms.items() if arm.gives_probability)
        return TokenDetailWriter(body, self.tokenizer, decoder_for(request, self.tokenizer), sure, self.plain_seconds)


class ResponseBuilder(ABC):
    """The answers to one HTTP request, as they come. `kind` and `chunk_kind` are OpenAI's names for the objects."""

    kind: str
    chunk_kind: str
    tells_logprobs: bool

    def __init__(self, house: ResponseContext, job: GenerationJob, body: Generation, name: str, model: str) -> None:
        self.house, self.job, self.body = house, job, body
        self.answers = job.answers()
        self.logprobs = LogprobWriter(house.tokenizer, bool(body.return_tokens_as_token_ids))
        self._places = {(answer.request.id, answer.request.choice): answer for answer in self.answers}
        self._tellers = [house.teller(answer.request, body) for answer in self.answers] if self.tells_tokens else []
        self.name, self.model = name, model
        self._forms: dict[tuple[int, Kind], ChunkTemplate] = {}  # of the choices, by what they say
        self._begun: set[int] = set()  # answers of which a stream has told something
        self._head = {"id": name, "created": int(time.time()), "model": model, "system_fingerprint": house.fingerprint}

    def answer(self, piece: StreamItem) -> ChoiceState:
        """Whose piece it is."""
        return self._places[piece.delta.request_id, piece.delta.choice]

    def add(self, piece: StreamItem) -> None:
        """Take in a piece of a reply that is sent whole."""
        answer = self.answer(piece)
        answer.add(piece)
        if self.tells_tokens:
            self._tellers[answer.index].keep(piece)

    @property
    def finished(self) -> bool:
        return all(answer.finish is not None for answer in self.answers)

    def whole(self) -> dict[str, Any]:
        """The reply in one."""
        choices = [self.choice(answer) for answer in self.answers]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage(), **self.account()}

    @abstractmethod
    def choice(self, answer: ChoiceState) -> dict[str, Any]:
        """One finished answer."""

    @abstractmethod
    def parts(self, answer: ChoiceState, piece: StreamItem, said: list[OutputPart]) -> Iterator[dict[str, Any]]:
        """What a piece adds to a choice, as choices of chunks; the last has its finish_reason."""

    @abstractmethod
    def spoken(self, kind: Kind) -> dict[str, Any] | None:
        """A choice that says BLANK, words or thoughts; None where such are not told, or not by words alone."""

    def events(self, piece: StreamItem) -> bytes:
        """What a piece adds to a stream, as it is sent."""
        answer = self.answer(piece)
        said = answer.add(piece)
        if len(said) == 1 and self.only_words and not piece.first and answer.finish is None:
            form = self._forms.get((answer.index, said[0].kind)) or self._form(answer.index, said[0].kind)
            if form is not None:
                return form.event(said[0].text)
        return b"".join([event(chunk) for chunk in self._chunks(answer, piece, said)])

    @cached_property
    def only_words(self) -> bool:
        """Whether a chunk in the midst of a stream has nothing to tell but what is said."""
        body, options = self.body, self.body.stream_options
        counts = options is not None and bool(options.continuous_usage_stats)
        more = (self.tells_logprobs, self.tells_tokens, body.timings_per_token, body.return_progress, counts)
        return not any(more) and not self.job.silent

    def _form(self, index: int, kind: Kind) -> ChunkTemplate | None:
        choice = self.spoken(kind)
        if choice is None:
            return None
        made = self._forms[index, kind] = ChunkTemplate(self._chunk([{"index": index, **choice}]))
        return made

    def _chunks(self, answer: ChoiceState, piece: StreamItem, said: list[OutputPart]) -> Iterator[dict[str, Any]]:
        for choice in self.parts(answer, piece, said):
            chunk = self._chunk([{"index": answer.index, **choice}])
            if choice.get("finish_reason") is not None and self.finished and not self.body.include_usage:
                chunk |= self.account()
            elif self.body.timings_per_token:
                chunk["timings"] = accounts.timings([answer])
            if self.body.return_progress and answer.index not in self._begun:
                self._begun.add(answer.index)
                chunk["prompt_progress"] = accounts.prompt_progress(answer)
            yield chunk
        if self.finished and self.body.include_usage:
            yield {**self._chunk([]), "usage": self.usage(), **self.account()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "object": self.chunk_kind, "choices": choices}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage() if options.continuous_usage_stats else None
        return chunk

    def usage(self) -> dict[str, Any]:
        used = accounts.usage(self.answers, self.house.desk.reasoning_tokens(self.answers))
        if self.job.silent:
            used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
        return used

    def account(self) -> dict[str, Any]:
        """What the answers cost and what speculation did."""
        found: dict[str, Any] = {"timings": accounts.timings(self.answers)}
        if self.house.records != "none":
            metrics = accounts.spec_metrics(self.answers, self.house.longest_draft, self.house.records == "detailed")
            found |= {} if metrics is None else {"metrics": metrics}
        return {**found, "speculation": accounts.speculation(self.answers)}

    @property
    def tells_tokens(self) -> bool:
        """Whether tokens or rounds are told of, beside the text."""
        body = self.body
        return bool(body.return_token_origin or body.return_token_details or body.return_rounds)

    def told(self, answer: ChoiceState, piece: StreamItem | None = None) -> dict[str, Any]:
        """What is told of the tokens of a piece, or of a whole answer."""
        if not self.tells_tokens:
            return {}
        teller = self._tellers[answer.index]
        return teller.kept if piece is None else teller.tell(piece)


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
        if piece.first:
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


class CompletionResponseBuilder(ResponseBuilder):
    """Texts, with their prompts in front where those are to be echoed."""

    kind = chunk_kind = "text_completion"

    def __init__(self, house: ResponseContext, job: GenerationJob, body: CompletionBody, name: str, model: str) -> None:
        super().__init__(house, job, body, name, model)
        self.tells_logprobs = body.logprobs is not None
        self._offsets = [0] * len(self.answers)  # characters that were told with their log-probabilities
        told = self.answers if self.tells_logprobs else []
        self._spelt = [decoder_for(answer.request, house.tokenizer) for answer in told]

    def choice(self, answer: ChoiceState) -> dict[str, Any]:
        rows = [*self._prompt_rows(answer), *self._rows(answer, answer.tokens, answer.logprobs)]
        return {
            "index": answer.index,
            "text": self._echo(answer) + ("" if self.job.silent else answer.content),
            "logprobs": self._logprobs(answer, rows),
            "finish_reason": self._reason(answer),
            **self.told(answer),
        }

    def spoken(self, kind: Kind) -> dict[str, Any] | None:
        return {"text": BLANK, "logprobs": None, "finish_reason": None}

    def parts(self, answer: ChoiceState, piece: StreamItem, said: list[OutputPart]) -> Iterator[dict[str, Any]]:
        tokens = list(piece.delta.tokens)
        words = "".join(part.text for part in said)
        text, rows = "" if self.job.silent else words, self._rows(answer, tokens, list(piece.delta.logprobs or ()))
        if piece.first:
            text, rows = self._echo(answer) + text, [*self._prompt_rows(answer), *rows]
        if text or self.tells_logprobs or self.tells_tokens:
            told = self.told(answer, piece)
            yield {"text": text, "logprobs": self._logprobs(answer, rows), "finish_reason": None, **told}
        if answer.finish is not None:
            yield {"text": "", "logprobs": None, "finish_reason": self._reason(answer)}

    def _reason(self, answer: ChoiceState) -> str:
        return "length" if self.job.silent else answer.finish_reason

    def _echo(self, answer: ChoiceState) -> str:
        return self.job.prompts[answer.index // answer.request.params.n] if self.job.prompts else ""

    def _rows(self, answer: ChoiceState, tokens: list[int], found: list[TokenLogprob]) -> list[Row]:
        if not self.tells_logprobs or self.job.silent:
            return []
        spelt = self._spelt[answer.index]
        return [(token, row, len(spelt.push([token]))) for token, row in zip(tokens, found, strict=True)]

    def _prompt_rows(self, answer: ChoiceState) -> list[Row]:
        """Of an echoed prompt; nothing foretells its first token."""
        if not self.job.prompts or not self.tells_logprobs:
            return []
        tokens, tokenizer = answer.request.prompt, self.house.tokenizer
        spelt = StreamDecoder(tokenizer, skip_special=False)
        lengths = [len(spelt.push([token])) for token in tokens]
        lengths[-1] += len(spelt.flush())
        if tokens[0] == tokenizer.bos_id and not self._echo(answer).startswith(tokenizer.token_text(tokens[0])):
            lengths[0] = 0  # the model has it so, the text that was sent has it not
        found = [answer.prompt_logprobs.get(place) for place in range(len(tokens))]
        return list(zip(tokens, found, lengths, strict=True))

    def _logprobs(self, answer: ChoiceState, rows: list[Row]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        found = self.logprobs.completion(rows, self._offsets[answer.index])
        self._offsets[answer.index] += sum(length for _, _, length in rows)
        return found
