"""What went wrong, in OpenAI's shape: a status, a sentence that says what would do, the field, a code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from foretell.engine.streams import QueueFull, StepFailed, Unavailable
from foretell.errors import CapacityError, RequestError, UnknownModelError
from foretell.options import nearest
from foretell.server.openai.requests import REFUSED

FIELD = re.compile(r"[a-z0-9_.]+")
KINDS = ("bool", "dict", "float", "int", "list", "str")
INVALID = "invalid_request_error"
INTERNAL = "internal_error"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that says why there is none."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=dict(self.headers))


def failure_of(error: Exception) -> ApiError:
    """What a caller is told of an error; what is not meant for callers stays in the log."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case CapacityError():
            return ApiError(400, str(error), param="max_tokens", code="context_length_exceeded")
        case UnknownModelError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case QueueFull():
            return _later(429, error, "rate_limit_error", "queue_full")
        case Unavailable():
            return _later(503, error, "server_error", "unavailable")
        case StepFailed():
            return ApiError(500, str(error), "server_error", code="step_failed")
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", "server_error", code="timeout")
    return ApiError(500, "a fault of ours; the server's log has it", "server_error", code=INTERNAL)


def _later(status: int, error: Unavailable, kind: str, code: str) -> ApiError:
    return ApiError(status, str(error), kind, code=code, headers={"Retry-After": str(error.retry_after)})


def invalid_body(error: RequestValidationError, known: list[str]) -> ApiError:
    """The most telling thing wrong with a body; an unknown field gets the nearest of the `known` ones."""
    problem = max(error.errors(), key=lambda each: len(each["loc"]))  # of a union, the branch that came furthest
    place = [str(part) for part in problem["loc"][1:]]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
    if problem["type"] == "extra_forbidden":
        param = ".".join([*_fields(place[:-1]), place[-1]])
        words = REFUSED.get(param) or f"is not known; {nearest(place[-1], known)}"
        return ApiError(400, f"{param}: {words}", param=param, code="unsupported_parameter")
    param = ".".join(_fields(place)) or "body"
    words = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {words}", param=param, code="invalid_value")


def _fields(place: list[str]) -> list[str]:
    """Without the branches of unions, which pydantic names as well."""
    return [part for part in place if part.isdecimal() or (FIELD.fullmatch(part) and part not in KINDS)]
