"""Translation of other APIs' requests to chat completions, which all of them are served as."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, ValidationError, model_validator

from foretell.errors import RequestError
from foretell.server.json_schemas import TemplateVariables
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import Prediction, Speculative, described, ignored, order_properties, sampling
from foretell.server.request_model import StrictModel, without_nulls

EFFORTS = {"minimal": "low", "low": "low", "medium": "medium"}  # others are high, the most that chat templates know

Fields = dict[str, Any]  # fields of a chat completion
Block = dict[str, Any]  # an object of a message's content


class TranslatedValidationError(RequestValidationError):
    """A field of the chat completion is invalid that a request was translated to."""


NOT_GENERATED = "Nothing is generated."


class TranslatedRequest(StrictModel):
    """The fields that every translated API shares."""

    model_config = ConfigDict(json_schema_extra=order_properties)
    shared: ClassVar[tuple[str, ...]] = ("model", "cache_salt", "chat_template_kwargs")

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    cache_salt: str | None = described("Requests share the prefix cache only with those of the same salt.")
    chat_template_kwargs: TemplateVariables | None = described(
        "Variables of the chat template, such as enable_thinking."
    )
    seed: Any = ignored(NOT_GENERATED)
    prediction: Any = ignored(NOT_GENERATED)
    speculative: Any = ignored(NOT_GENERATED)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: Any) -> Any:
        """Drop fields that are null."""
        return without_nulls(data) if isinstance(data, dict) else data

    @classmethod
    def may_ignore(cls, name: str, known: Iterable[str]) -> bool:
        """Refuse settings of `speculative` outside it as well."""
        return name not in Speculative.model_fields and super().may_ignore(name, known)

    def shared_fields(self) -> Fields:
        """Return the fields that a chat completion has under the same name."""
        return {name: getattr(self, name) for name in self.shared}


class GeneratingRequest(TranslatedRequest):
    """The fields that every translated API shares where it generates."""

    shared = (*TranslatedRequest.shared, "seed", "prediction", "speculative")

    seed: int | None = sampling("seed", -(2**63), 2**63 - 1)
    prediction: Prediction | None = described("Foretell's: the expected output, used as draft; it never changes it.")
    speculative: bool | Speculative | None = described(
        "Foretell's: speculative decoding of this request: false for plain decoding, or settings."
    )


def chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """Return a chat completion with these fields; None counts as left out."""
    try:
        return ChatCompletionRequest.model_validate({name: each for name, each in fields.items() if each is not None})
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise TranslatedValidationError(problems) from None


def template_variables(fields: Fields, *, thinking: bool | None, effort: str | None) -> None:
    """Set the template variables that turn reasoning on or off; a template that has none ignores them."""
    variables: dict[str, Any] = {}
    if thinking is not None:
        variables |= {"enable_thinking": thinking, "thinking": thinking}  # Qwen's name, and DeepSeek's
    if effort is not None and effort != "none":
        variables["reasoning_effort"] = EFFORTS.get(effort, "high")
    if variables:
        fields["chat_template_kwargs"] = variables | (fields.get("chat_template_kwargs") or {})


def text_of(block: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a text block; reject any other by its type."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(where, f"has the type {kind!r}, which this model does not take; send text")
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(where, "has no text; add the field text as a string")
    return text


def string_field(block: Block, name: str, where: str) -> str:
    """Return a field of a block that must be a string."""
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}", "must be a string")
    return value


def tool_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call of a chat message; `arguments` is JSON text or a value."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return a tool of a chat completion."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def json_schema_format(schema: Any) -> dict[str, Any]:
    """Return the response_format of a chat completion that enforces a JSON schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}
