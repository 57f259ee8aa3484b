"""Request bodies of Ollama's /api/chat, /api/generate and /api/show, and their translation."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.errors import RequestError
from foretell.server.dialects import OLLAMA_OPTIONS
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import CompletionRequest, FailFastList, described
from foretell.server.translation import (
    Fields,
    TranslatedRequest,
    chat_request,
    function_tool,
    json_schema_format,
    string_field,
    template_variables,
    tool_call,
)

LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
NUMBERS = {ours: theirs for ours, theirs in OLLAMA_OPTIONS.items() if ours not in ("max_tokens", "stop")}
INTEGERS = ("top_k", "seed")
NO_EFFECT = ("keep_alive", "truncate", "shift")  # fields without a meaning here that every client may send
EXAMPLE_OPTIONS = {"num_predict": 64}


class OllamaMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: str | None = described("The text.")
    thinking: str | None = described("Reasoning of an earlier answer, if the chat template uses it.")
    images: FailFastList[Any] | None = described("Rejected: this model takes text only.")
    tool_calls: FailFastList[dict[str, Any]] | None = described("Calls that an assistant's message made.")
    tool_name: str | None = described("Role tool: the tool that this is the result of.")
    tool_call_id: str | None = described("Role tool: the call that this is the result of.")


class OllamaRequest(TranslatedRequest):
    """The fields shared by /api/chat and /api/generate."""

    stream: bool | None = described("false: one object instead of a line for each part; the default is true.")
    format: str | dict[str, Any] | None = described("`json` for any JSON object, or a JSON schema.")
    options: dict[str, Any] | None = Field(
        default=None,
        description="Sampling parameters: " + ", ".join(sorted(OLLAMA_OPTIONS.values())) + ". Others are ignored.",
        examples=[EXAMPLE_OPTIONS],
    )
    think: bool | str | None = described("Turns reasoning on or off, or sets its effort, if the model has it.")
    keep_alive: str | int | float | None = described("Accepted without effect: the model stays loaded.")

    def generation_fields(self) -> Fields:
        """Return the fields of format, options and shared ones."""
        fields: Fields = {**self.shared_fields(), **self._option_fields()}
        fields["stream"] = self.stream is not False
        if isinstance(self.format, dict):
            fields["response_format"] = json_schema_format(self.format)
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            raise RequestError("format", f"must be json or a JSON schema, not {self.format!r}")
        if (self.model_extra or {}).get("logprobs"):
            raise RequestError("logprobs", "are not supported here; use /v1/chat/completions")
        return fields

    def _option_fields(self) -> Fields:
        options = self.options or {}
        fields: Fields = {}
        for name, theirs in NUMBERS.items():
            value = options.get(theirs)
            if value is not None:
                fields[name] = _number(value, theirs, whole=name in INTEGERS)
        if fields.get("seed") == -1:
            del fields["seed"]  # a random one
        limit = options.get("num_predict")
        limit = 0 if limit is None else _number(limit, "num_predict", whole=True)
        if limit > 0:  # others: until the context ends
            fields["max_tokens"] = limit
        stop = options.get("stop")
        if stop is not None:
            texts = [stop] if isinstance(stop, str) else stop
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise RequestError("options.stop", "must be a string or a list of strings")
            fields["stop"] = texts
        return fields

    def add_thinking(self, fields: Fields) -> None:
        """Set the template variables of `think`."""
        effort = self.think if isinstance(self.think, str) else None
        template_variables(fields, thinking=None if self.think is None else self.think is not False, effort=effort)

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields and options without effect."""
        known = OLLAMA_OPTIONS.values()
        options = [f"options.{name}" for name in self.options or () if name not in known]
        return [name for name in self.model_extra or () if name not in NO_EFFECT] + options


def _number(value: Any, name: str, whole: bool) -> Any:
    if whole and isinstance(value, float) and value.is_integer():
        return int(value)  # Ollama takes any JSON number
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise RequestError(f"options.{name}", f"must be {'an integer' if whole else 'a number'}")
    return value


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: FailFastList[OllamaMessage] | None = Field(
        default=None,
        description="The conversation so far, oldest message first; without it the request only asks for the model.",
        examples=[[{"role": "user", "content": "Why is the sky blue?"}]],
    )
    tools: FailFastList[dict[str, Any]] | None = described("Functions that the model may call.")

    def to_chat(self, model: str) -> ChatCompletionRequest:
        """Return the request of OpenAI's API that means the same."""
        fields = {**self.generation_fields(), "model": model, "messages": self._messages()}
        fields["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())] or None
        self.add_thinking(fields)
        return chat_request(fields)

    def _messages(self) -> list[dict[str, Any]]:
        """Return chat messages. Ollama's calls have no id: results belong to the calls before them, in order."""
        messages: list[dict[str, Any]] = []
        open_calls: deque[str] = deque()
        num_calls = 0
        for i, message in enumerate(self.messages or ()):
            _refuse_images(message.images, f"messages.{i}.images")
            chat: dict[str, Any] = {"role": message.role, "content": message.content or ""}
            if message.thinking:
                chat["reasoning_content"] = message.thinking
            if message.role == "tool":
                chat["tool_call_id"] = message.tool_call_id or (open_calls.popleft() if open_calls else None)
                chat["name"] = message.tool_name
            calls = [
                _earlier_call(call, f"messages.{i}.tool_calls.{j}") for j, call in enumerate(message.tool_calls or ())
            ]
            for call in calls:
                call["id"] = call["id"] or f"call{num_calls:05d}"
                num_calls += 1
                open_calls.append(call["id"])
            messages.append(chat | ({"tool_calls": calls} if calls else {}))
        return messages


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = Field(
        default=None,
        description="The user's text; without it the request only asks for the model.",
        examples=["Why is the sky blue?"],
    )
    suffix: str | None = described("Text after the gap that the model fills, by its own fill-in-the-middle tokens.")
    system: str | None = described("The system prompt.")
    raw: bool | None = described("true: the prompt is not put into the chat template.")
    images: FailFastList[Any] | None = described("Rejected: this model takes text only.")
    template: str | None = described("Rejected: the model's own chat template is used; send raw for another one.")
    context: FailFastList[int] | None = described("Rejected: send the conversation to /api/chat.")

    def check(self) -> None:
        """Reject the fields that are not supported."""
        _refuse_images(self.images, "images")
        if self.template:
            raise RequestError("template", "cannot be replaced per request; send the whole prompt with raw")
        if self.context:
            raise RequestError("context", "is not supported; send the conversation to /api/chat")

    def to_chat(self, model: str) -> ChatCompletionRequest:
        """Return the chat completion of one user message."""
        self.check()
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        fields = {**self.generation_fields(), "model": model, "messages": messages}
        self.add_thinking(fields)
        return chat_request(fields)

    def raw_fields(self, model: str) -> Fields:
        """Return the fields of a completion, without its prompt."""
        self.check()
        fields = self.generation_fields() | {"model": model}
        return {
            name: value
            for name, value in fields.items()
            if value is not None and name in CompletionRequest.model_fields
        }

    @property
    def raw_prompt(self) -> str:
        """Return the text that the model continues."""
        return "\n\n".join(text for text in (self.system, self.prompt) if text)


class ShowRequest(BaseModel):
    """POST /api/show."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = described("A name that `/api/tags` lists; without it, the served model.")
    name: str | None = described("Older name of `model`.")
    verbose: bool | None = described("Accepted without effect.")


def _refuse_images(images: list[Any] | None, where: str) -> None:
    if images:
        raise RequestError(where, "are not supported: this model takes text only; leave them out")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function", "must be an object with a name")
    name = string_field(function, "name", f"{where}.function")
    return function_tool(name, function.get("description"), function.get("parameters"))


def _earlier_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function", "must be an object with a name")
    call_id = call.get("id")
    arguments = function.get("arguments", {})
    name = string_field(function, "name", f"{where}.function")
    return tool_call(call_id if isinstance(call_id, str) else None, name, arguments)
