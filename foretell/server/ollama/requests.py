"""Request bodies of Ollama's /api/chat, /api/generate and /api/show, and their translation."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from foretell.errors import RequestError
from foretell.server.dialects import OLLAMA_OPTIONS
from foretell.server.json_schemas import (
    NULL,
    OBJECT,
    TEXT,
    TEXT_OR_NULL,
    TOOL_NAME,
    EmptyList,
    EmptyText,
    Stop,
    any_of,
    record,
)
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import (
    CompletionRequest,
    FailFastList,
    described,
    ignored,
    order_properties,
    ranged,
    sampling,
)
from foretell.server.request_model import StrictModel
from foretell.server.translation import (
    Fields,
    GeneratingRequest,
    chat_request,
    function_tool,
    json_schema_format,
    string_field,
    template_variables,
    tool_call,
)

EarlierCall = Annotated[dict[str, Any], WithJsonSchema(record("function", function=record("name", name=TEXT)))]
FUNCTION = record("name", name=TOOL_NAME, description=TEXT_OR_NULL, parameters=any_of(NULL, OBJECT))
FunctionTool = Annotated[dict[str, Any], WithJsonSchema(record("function", function=FUNCTION))]
Format = Annotated[str | dict[str, Any], WithJsonSchema(any_of({"enum": ["", "json"]}, OBJECT))]
Off = Annotated[bool, WithJsonSchema({"const": False})]
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
INTEGERS = ("top_k", "seed", "num_predict")
EXAMPLE_OPTIONS = {"num_predict": 64}


AT_START = "It is set when the server starts."
NO_SAMPLER = "There is no such sampler."


class OllamaOptions(StrictModel):
    """Sampling parameters."""

    model_config = ConfigDict(json_schema_extra=order_properties)
    path = "options."
    reported = frozenset(
        ("num_ctx", "num_keep", "repeat_last_n", "mirostat", "tfs_z", "typical_p", "penalize_newline")
        + ("rope_frequency_base", "rope_frequency_scale")
    )

    num_predict: int | None = described("Maximum output tokens; 0 and negative numbers: the rest of the context.")
    temperature: float | None = sampling("temperature", 0)
    top_k: int | None = sampling("top_k", -1)
    top_p: float | None = sampling("top_p", above=0, maximum=1)
    min_p: float | None = sampling("min_p", 0, 1)
    presence_penalty: float | None = sampling("presence_penalty", -2, 2)
    frequency_penalty: float | None = sampling("frequency_penalty", -2, 2)
    repeat_penalty: float | None = sampling("repetition_penalty", above=0)
    seed: int | None = ranged("Seed of the samples; -1 is a random one.", -(2**63), 2**63 - 1)
    stop: Stop | FailFastList[Stop] | None = described("Stop strings; the output ends before the first of them.")
    num_ctx: Any = ignored(AT_START)
    num_batch: Any = ignored(AT_START)
    num_gpu: Any = ignored(AT_START)
    num_gqa: Any = ignored("It is the model's.")
    num_thread: Any = ignored(AT_START)
    num_keep: Any = ignored("Nothing is dropped from the context.")
    main_gpu: Any = ignored(AT_START)
    numa: Any = ignored(AT_START)
    low_vram: Any = ignored(AT_START)
    f16_kv: Any = ignored(AT_START)
    logits_all: Any = ignored(AT_START)
    vocab_only: Any = ignored(AT_START)
    embedding_only: Any = ignored(AT_START)
    use_mmap: Any = ignored(AT_START)
    use_mlock: Any = ignored(AT_START)
    rope_frequency_base: Any = ignored(AT_START)
    rope_frequency_scale: Any = ignored(AT_START)
    repeat_last_n: Any = ignored("Penalties look at the whole text.")
    penalize_newline: Any = ignored("Line breaks are penalized like other tokens.")
    typical_p: Any = ignored(NO_SAMPLER)
    tfs_z: Any = ignored(NO_SAMPLER)
    mirostat: Any = ignored(NO_SAMPLER)
    mirostat_tau: Any = ignored(NO_SAMPLER)
    mirostat_eta: Any = ignored(NO_SAMPLER)

    @field_validator(*INTEGERS, mode="before")
    @classmethod
    def take_whole_numbers(cls, value: Any) -> Any:
        """Take 3.0 for 3, as Ollama does."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def fields(self) -> Fields:
        """Return the fields of a chat completion."""
        fields = {ours: getattr(self, theirs) for ours, theirs in OLLAMA_OPTIONS.items()}
        if self.seed == -1:
            fields["seed"] = None
        if (self.num_predict or 0) <= 0:
            fields["max_tokens"] = None
        if isinstance(self.stop, str):
            fields["stop"] = [self.stop]
        return {name: value for name, value in fields.items() if value is not None}


class OllamaMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: str | None = described("The text.")
    thinking: str | None = described("Reasoning of an earlier answer, if the chat template uses it.")
    images: EmptyList | None = described("Rejected: this model takes text only.")
    tool_calls: FailFastList[EarlierCall] | None = described("Calls that an assistant's message made.")
    tool_name: str | None = described("Role tool: the tool that this is the result of.")
    tool_call_id: str | None = described("Role tool: the call that this is the result of.")


class OllamaRequest(GeneratingRequest):
    """The fields shared by /api/chat and /api/generate."""

    stream: bool | None = described("false: one object instead of a line for each part; the default is true.")
    format: Format | None = described("`json` for any JSON object, or a JSON schema.")
    options: OllamaOptions | None = Field(default=None, description="Sampling parameters.", examples=[EXAMPLE_OPTIONS])
    think: bool | str | None = described("Turns reasoning on or off, or sets its effort, if the model has it.")
    logprobs: Off | None = described("Only false: /v1/chat/completions returns logprobs.")
    keep_alive: str | int | float | None = ignored("The model stays loaded.")
    top_logprobs: Any = ignored("There are no logprobs here.")
    truncate: Any = ignored("Prompts are never truncated.")
    shift: Any = ignored("Nothing is dropped from the context.")

    def generation_fields(self) -> Fields:
        """Return the fields of format, options and shared ones."""
        options = {} if self.options is None else self.options.fields()
        fields: Fields = {**self.shared_fields(), **options}
        fields["stream"] = self.stream is not False
        if isinstance(self.format, dict):
            fields["response_format"] = json_schema_format(self.format)
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            raise RequestError("format", f"must be json or a JSON schema, not {self.format!r}")
        if self.logprobs:
            raise RequestError("logprobs", "are not supported here; use /v1/chat/completions")
        return fields

    def add_thinking(self, fields: Fields) -> None:
        """Set the template variables of `think`."""
        effort = self.think if isinstance(self.think, str) else None
        template_variables(fields, thinking=None if self.think is None else self.think is not False, effort=effort)


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: FailFastList[OllamaMessage] | None = Field(
        default=None,
        description="The conversation so far, oldest message first; without it the request only asks for the model.",
        examples=[[{"role": "user", "content": "Why is the sky blue?"}]],
    )
    tools: FailFastList[FunctionTool] | None = described("Functions that the model may call.")

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
    images: EmptyList | None = described("Rejected: this model takes text only.")
    template: EmptyText | None = described("Rejected: the model's own chat template is used; send raw for another one.")
    context: EmptyList | None = described("Rejected: send the conversation to /api/chat.")

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


class ShowRequest(StrictModel):
    """POST /api/show."""

    model: str | None = described("A name that `/api/tags` lists; without it, the served model.")
    name: str | None = described("Older name of `model`.")
    verbose: bool | None = ignored("There is one description.")
    options: Any = ignored("They are those of each request.")
    system: Any = ignored("It is that of each request.")
    template: Any = ignored("It is the model's.")


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
