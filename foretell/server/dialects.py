"""Error formats of the APIs: the shape of a body, the last event of a failed stream, the names of fields.

A path decides which API a request belongs to, so that middleware can refuse a request in the shape its client reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.responses import JSONResponse

from foretell.server.errors import ApiError
from foretell.server.sse import DONE, json_line, sse_event, typed_event

ErrorBody = Callable[[ApiError], dict[str, Any]]


@dataclass(frozen=True)
class Dialect:
    """The errors of one API."""

    body: ErrorBody
    stream_error: Callable[[ApiError], bytes]  # the last events of a stream that fails
    field_names: Mapping[str, str] = field(default_factory=dict)  # by the name of the chat completion's field

    def response(self, error: ApiError) -> JSONResponse:
        """Return the HTTP response of an error."""
        return JSONResponse(self.body(self._renamed(error)), error.status, headers=dict(error.headers))

    def _renamed(self, error: ApiError) -> ApiError:
        """Name the field as this API does: the request was translated to a chat completion before it was checked."""
        first, dot, rest = (error.param or "").partition(".")
        if error.param is None or error.is_named or first not in self.field_names:
            return error
        param = f"{self.field_names[first]}{dot}{rest}"
        message = error.message
        if message.startswith(f"{error.param}:"):
            message = param + message.removeprefix(error.param)
        return replace(error, param=param, message=message)


OPENAI = Dialect(ApiError.body, lambda error: sse_event(error.body()) + DONE)

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error body. Clients recognize a context that is too small by its first words."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    too_long = error.code == "context_length_exceeded" and not error.message.startswith("prompt is too long")
    message = f"prompt is too long: {error.message}" if too_long else error.message
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(error.status, default), "message": message}}


ANTHROPIC = Dialect(anthropic_error, lambda error: typed_event(anthropic_error(error)), {"stop": "stop_sequences"})


def responses_error_event(error: ApiError, sequence_number: int = 0) -> bytes:
    """Return the event that ends a stream of /v1/responses outside of a response."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return typed_event({"type": "error", "sequence_number": sequence_number, **fields})


RESPONSES = Dialect(
    ApiError.body,
    responses_error_event,
    {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"},
)


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return an error as Ollama sends it: the message without a type or a field."""
    return {"error": error.message}


OLLAMA_OPTIONS = {  # names of the sampling parameters in `options`
    "max_tokens": "num_predict",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
OLLAMA = Dialect(
    ollama_error,
    lambda error: json_line(ollama_error(error)),
    {name: f"options.{theirs}" for name, theirs in OLLAMA_OPTIONS.items()} | {"response_format": "format"},
)

DIALECTS = {"/v1/messages": ANTHROPIC, "/v1/responses": RESPONSES, "/api/": OLLAMA}  # by the start of the path


def dialect_of(path: str) -> Dialect:
    """Return the API that a path belongs to; OpenAI's chat completions for all others."""
    return next((dialect for start, dialect in DIALECTS.items() if path.startswith(start)), OPENAI)
