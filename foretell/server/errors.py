"""API errors in OpenAI's shape: status, message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from foretell.engine.streams import QueueFull, StepFailed, Unavailable
from foretell.errors import CapacityError, ContextLengthError, RequestError, UnknownModelError
from foretell.options import closest
from foretell.server.openai.requests import Speculative
from foretell.server.request_model import MEDIA_FIELDS, TEXT_ONLY, StrictModel

FIELD = re.compile(r"[a-z0-9_.]+")
UNION_BRANCHES = ("bool", "dict", "float", "int", "list", "str")  # pydantic adds these to an error's location
INVALID = "invalid_request_error"
INTERNAL = "internal_error"
MAX_SHOWN_PATH = 80  # characters of an unknown path in the error message
# Routes of other servers, by the start of their path, with what would work here.
ELSEWHERE = {
    "/v1/embeddings": ": this server generates text and has no embeddings",
    "/v1/messages/": ": of Anthropic's API there are messages and count_tokens",
    "/v1/responses/": ": of OpenAI's Responses API there are creating, reading and deleting a response, and "
    "input_tokens; input items are not kept: the client has them, and previous_response_id continues them",
    "/v1/": ": of OpenAI's API there are chat completions, completions, responses and models",
    "/api/embed": ": this server generates text and has no embeddings",
    "/api/": ": the model is chosen when the server starts; of Ollama's API there are chat, generate, show, tags, ps",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response; `kind` is OpenAI's `type`."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_named: bool = False  # `param` is a name of the API that was called, even if a chat completion has it, too

    def body(self) -> dict[str, Any]:
        """Return the error as the body of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def to_api_error(error: Exception) -> ApiError:
    """Return the API error for an exception. Details of internal errors go only to the log."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, error.api_message, param=error.field, code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case CapacityError():
            return ApiError(400, str(error), param="max_tokens", code="context_length_exceeded")
        case UnknownModelError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case QueueFull():
            return _with_retry_after(429, error, "rate_limit_error", "queue_full")
        case Unavailable():
            return _with_retry_after(503, error, "server_error", "unavailable")
        case StepFailed():
            return ApiError(500, str(error), "server_error", code="step_failed")
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", "server_error", code="timeout")
    return ApiError(500, "internal server error; see the server's log", "server_error", code=INTERNAL)


def routing_error(error: HTTPException, request: Request, paths: Mapping[str, Mapping[str, Any]]) -> ApiError:
    """Return the API error for a request to no route, or with a method that the route does not have.

    `paths` are those of the OpenAPI schema, each with its methods.
    """
    asked = f"{request.method} {request.url.path[:MAX_SHOWN_PATH]}"
    headers = error.headers or {}
    if error.status_code == 405:
        allowed = ", ".join(sorted(_allowed_methods(request.url.path, headers.get("Allow", ""), paths)))
        headers = {**headers, "Allow": allowed}
        return ApiError(405, f"{asked} is not allowed; use {allowed}", code="method_not_allowed", headers=headers)
    if error.status_code != 404:
        return ApiError(error.status_code, str(error.detail), headers=headers)
    reason = next((hint for prefix, hint in ELSEWHERE.items() if request.url.path.startswith(prefix)), "")
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    message = f"there is no {asked}{reason}; this server has {', '.join([*routes, 'GET /docs', 'GET /'])}"
    return ApiError(404, message, code="not_found", headers=headers)


def _allowed_methods(path: str, allow: str, paths: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the methods of all routes of a path: the router's own header names those of the first alone.

    A path without parameters is not one of a route with them as well.
    """
    if path in paths:
        return {method.upper() for method in paths[path]}
    patterns = {re.compile(re.sub(r"{[^}]+}", "[^/]+", each)): methods for each, methods in paths.items()}
    found = {method.upper() for pattern, methods in patterns.items() if pattern.fullmatch(path) for method in methods}
    return found | {method.strip() for method in allow.split(",") if method.strip()}


def _with_retry_after(status: int, error: Unavailable, kind: str, code: str) -> ApiError:
    return ApiError(status, str(error), kind, code=code, headers={"Retry-After": str(error.retry_after)})


def validation_error(error: RequestValidationError, body: type[BaseModel] | None) -> ApiError:
    """Return the API error for the most specific problem of a body; for typos suggest one of the fields of `body`."""
    problem = max(error.errors(), key=lambda each: len(each["loc"]))  # for a union, the branch that matched furthest
    location = [str(part) for part in problem["loc"][1:]]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
    if problem["type"] == "extra_forbidden":
        param = ".".join([*_field_path(location[:-1]), location[-1]])
        known = [] if body is None else [field.alias or name for name, field in body.model_fields.items()]
        reason = body.refusals.get(param) if body is not None and issubclass(body, StrictModel) else None
        if reason is None:
            unknown = f"is not known; {_known_field(param, known)}"
            reason = TEXT_ONLY if location[-1] in MEDIA_FIELDS else unknown
        return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")
    if not location and problem["type"] == "model_attributes_type":
        # FastAPI reads a body as JSON only if the header says so.
        unread = "was not sent as JSON; add the header Content-Type: application/json"
        reason = unread if isinstance(problem["input"], bytes) else "must be a JSON object"
        return ApiError(400, f"body: {reason}", param="body", code="invalid_value")
    param = ".".join(_field_path(location)) or "body"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")


def _known_field(param: str, known: list[str]) -> str:
    """Return what to send instead of an unknown field: the closest one of the same object, or where all are listed."""
    place, _, name = param.rpartition(".")
    settings = list(Speculative.model_fields)
    if not place and name in settings and "speculative" in known:
        return "put it into speculative"
    objects = {each.path: list(each.model_fields) for each in StrictModel.__subclasses__() if each.path}
    path = "".join(f"{part}." for part in place.split(".") if not part.isdecimal())
    close = closest(name, objects.get(path, []) if place else known)
    return f"did you mean {close!r}?" if close else "GET /docs lists the fields"


def _field_path(location: list[str]) -> list[str]:
    """Return the location without union branches, which pydantic includes."""
    return [part for part in location if part.isdecimal() or (FIELD.fullmatch(part) and part not in UNION_BRANCHES)]
