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
from foretell.server.logprobs import LogprobWriter
from foretell.server.openai.requests import Generation
from foretell.server.parsers.base import Kind, OutputPart
from foretell.server.speedup import PlainSeconds, unknown
from foretell.server.sse import ChunkTemplate, event
from foretell.server.token_details import TokenDetailWriter

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.preprocess import GenerationJob, RequestPreprocessor
    from foretell.tokenizer import Tokenizer
    from foretell.types import Request


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
        if len(said) == 1 and self.only_words and not piece.is_first and answer.finish is None:
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
