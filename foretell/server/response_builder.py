"""The base of all response builders: one builds the response to one HTTP request as its output arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretell.engine.detokenizer import decoder_for
from foretell.server import usage
from foretell.server.choice_state import ChoiceState
from foretell.server.dialects import OPENAI, Dialect
from foretell.server.metrics import PlainSeconds, no_estimate
from foretell.server.sse import COMMENT
from foretell.server.token_details import TokenDetailFormatter

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.errors import ApiError
    from foretell.server.openai.requests import GenerationRequest
    from foretell.server.preprocess import GenerationJob, RequestPreprocessor
    from foretell.tokenizer import Tokenizer
    from foretell.types import Request


@dataclass(frozen=True)
class ResponseContext:
    """Settings shared by all responses of a server."""

    preprocessor: RequestPreprocessor
    fingerprint: str  # `system_fingerprint` of every response
    max_draft: int  # most draft tokens per step
    spec_metrics_level: str  # none, summary or detailed
    plain_seconds: PlainSeconds = no_estimate

    @property
    def tokenizer(self) -> Tokenizer:
        return self.preprocessor.tokenizer

    def token_detail_formatter(self, request: Request, body: GenerationRequest) -> TokenDetailFormatter:
        """Return the formatter for a request that asks for per-token details."""
        drafters = self.preprocessor.assembly.engine.drafter.drafters
        return TokenDetailFormatter(
            body=body,
            tokenizer=self.tokenizer,
            decoder=decoder_for(request, self.tokenizer),
            probability_drafters=frozenset(
                name for name, drafter in drafters.items() if drafter.traits.gives_probability
            ),
            plain_seconds=self.plain_seconds,
        )


class ResponseBuilder(ABC):
    """Builds the response to one HTTP request in the shape of one API."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream
    dialect: ClassVar[Dialect] = OPENAI
    end_of_stream: ClassVar[bytes] = b""  # sent after the last event

    def __init__(
        self, context: ResponseContext, job: GenerationJob, body: GenerationRequest, request_id: str, model: str
    ) -> None:
        self.context, self.job, self.body = context, job, body
        self.request_id, self.model = request_id, model
        self.choices = job.choices()
        self._choice_states = {(choice.request.id, choice.request.choice): choice for choice in self.choices}

    def choice_state(self, item: StreamItem) -> ChoiceState:
        """Return the choice that an item belongs to."""
        return self._choice_states[item.delta.request_id, item.delta.choice]

    @abstractmethod
    def add(self, item: StreamItem) -> None:
        """Add an item to a response that is sent complete."""

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """Return the body of the complete response."""

    @abstractmethod
    def events(self, item: StreamItem) -> bytes:
        """Return the events of a stream for an item."""

    def early_events(self) -> bytes:
        """Return what a stream begins with if its output is late; `events` leaves it out then."""
        return self.sign_of_life()

    def sign_of_life(self) -> bytes:
        """Return what a stream sends while there is no output."""
        return COMMENT

    def error_events(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        return self.dialect.stream_error(error)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage` of all choices."""
        counts = usage.usage(self.choices, self.context.preprocessor.count_reasoning_tokens(self.choices))
        if self.job.prompt_only:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def accounting(self) -> dict[str, Any]:
        """Return the timings and the speculation statistics of all choices."""
        fields: dict[str, Any] = {"timings": usage.timings(self.choices)}
        level = self.context.spec_metrics_level
        if level != "none":
            metrics = usage.spec_metrics(self.choices, self.context.max_draft, detailed=level == "detailed")
            if metrics is not None:
                fields["metrics"] = metrics
        return {**fields, "speculation": usage.speculation(self.choices)}
