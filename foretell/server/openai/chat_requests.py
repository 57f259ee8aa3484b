"""Parsed request bodies of /v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.server.json_schemas import (
    FORCED_CALL,
    TOOL_NAME_PATTERN,
    TOP_LOGPROBS,
    TemplateVariables,
    TextPart,
    also,
)
from foretell.server.openai.requests import (
    FailFastList,
    GenerationRequest,
    describe_generation,
    described,
    ranged,
    sampling,
)
from foretell.server.request_model import MEDIA_FIELDS, StrictModel

Role = Literal["system", "developer", "user", "assistant", "tool"]
# Roles whose content may be null, or have parts of any type: clients send responses and results back as they came.
MAY_BE_EMPTY = ("assistant", "tool")


class FunctionCall(BaseModel):
    """A function and its arguments, as a model called it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str = Field(description="Name of the function.")
    arguments: str = Field(default="{}", description="Its arguments as JSON text.")


class ToolCall(BaseModel):
    """A tool call of an earlier response."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = described("Id of the call, which the message with its result repeats.")
    type: Literal["function"] = Field(default="function", description="Always `function`.")
    function: FunctionCall = Field(description="The function and its arguments.")


def _require_content(schema: dict[str, Any]) -> None:
    """Require a content except of roles whose messages clients send back as they came."""
    empty = {"properties": {"role": {"enum": [*MAY_BE_EMPTY]}}}
    schema["anyOf"] = [empty, {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}]


class ChatMessageParam(BaseModel):
    """A message of a conversation. Clients send responses back, so unknown fields are ignored here."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=_require_content)

    role: Role = Field(description="Who speaks: system or developer, user, assistant, or the result of a tool.")
    content: str | FailFastList[TextPart] | None = described("The text, as a string or as text parts.")
    name: str | None = described("Name of the speaker, if the chat template uses it.")
    tool_calls: FailFastList[ToolCall] | None = described("Calls that an assistant's message made.")
    tool_call_id: str | None = described("Role tool: the call that this is the result of.")
    reasoning_content: str | None = described("Reasoning of an earlier response, if the chat template uses it.")
    reasoning: str | None = described("Another name of reasoning_content.")
    refusal: str | None = described("A refusal of an earlier response; its text if content is missing.")

    @model_validator(mode="before")
    @classmethod
    def reject_unsupported_content(cls, data: Any) -> Any:
        """Reject media and OpenAI's deprecated function calls, whose meaning would be lost.

        Media of earlier output and of tools become parts of the content, for which a placeholder stands: clients send
        them back with every request.
        """
        if not isinstance(data, dict):
            return data
        if data.get("function_call") not in (None, ""):
            raise ValueError("function_call is not supported by this model; send text or tool_calls")
        media = [name for name in sorted(MEDIA_FIELDS) if data.get(name) not in (None, [], "")]
        if not media:
            return data
        content = data.get("content") or []
        if data.get("role") not in MAY_BE_EMPTY or not isinstance(content, str | list):
            raise ValueError(f"{media[0]} is not supported by this model; send text or tool_calls")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return {**data, "content": [*parts, *({"type": name} for name in media)]}


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    path = "tools.function."

    name: str = Field(pattern=TOOL_NAME_PATTERN, description="Name of the function.")
    description: str | None = described("What it does, for the model.")
    parameters: dict[str, Any] | None = described("JSON schema of its arguments.")
    strict: bool | None = described("true: a grammar enforces the schema, in tool call formats with a start tag.")


class Tool(StrictModel):
    """A tool that the model may use."""

    path = "tools."

    type: Literal["function"] = Field(description="Always `function`.")
    function: FunctionDefinition = Field(description="The function.")


class NamedFunction(StrictModel):
    """The name of a function."""

    name: str = Field(description="Name of a function in tools.")


class NamedTool(StrictModel):
    """A function that must be called."""

    type: Literal["function"] = Field(default="function", description="Always `function`.")
    function: NamedFunction = Field(description="The function that must be called.")


def _describe_chat(schema: dict[str, Any]) -> None:
    describe_generation(schema)
    also(FORCED_CALL, TOP_LOGPROBS)(schema)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=_describe_chat)

    messages: FailFastList[ChatMessageParam] = Field(
        min_length=1,
        description="The conversation so far, oldest message first.",
        examples=[[{"role": "user", "content": "Why is the sky blue?"}]],
    )
    max_completion_tokens: int | None = ranged("OpenAI's newer name of max_tokens; it takes precedence.", 1)
    logprobs: bool | None = described("true: return the logprob of each token.")
    top_logprobs: int | None = ranged("With logprobs: also those of this many most likely tokens.", 0, 20)
    tools: FailFastList[Tool] | None = described("Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = described(
        "`auto`: the model decides (the default with tools), `none`, `required`: at least one call, or a function."
    )
    parallel_tool_calls: bool | None = described("false: return only the first tool call.")
    chat_template_kwargs: TemplateVariables | None = described(
        "Variables of the chat template, such as enable_thinking."
    )
    reasoning_effort: str | None = described(
        "A chat template variable; without effect if the template does not use it."
    )
    include_reasoning: bool | None = described("false: leave reasoning_content out of the response.")
    thinking_budget: int | None = sampling("thinking_budget", 0)
    thinking_token_budget: int | None = ranged("Alias of thinking_budget.", 0)


def _prompt_or_messages(schema: dict[str, Any]) -> None:
    given = {"prompt": {"type": "string"}, "content": {"type": "string"}, "messages": {"type": "array", "minItems": 1}}
    none = dict.fromkeys(given, {"type": "null"})
    schema["oneOf"] = [{"properties": {**none, name: kind}, "required": [name]} for name, kind in given.items()]


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt or the messages of a chat."""

    model_config = ConfigDict(json_schema_extra=_prompt_or_messages)

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    prompt: str | None = Field(default=None, description="The text; leave out messages.", examples=["Hello, world"])
    content: str | None = described("llama.cpp's name of prompt, without the tokens that start a sequence.")
    add_special: bool = Field(default=False, description="With content: add the tokens that start a sequence.")
    with_pieces: bool = Field(default=False, description="Return each token as an object with `id` and `piece`.")
    messages: FailFastList[ChatMessageParam] | None = described("The conversation; leave out prompt.")
    tools: FailFastList[Tool] | None = described("With messages: functions that the model may call.")
    add_special_tokens: bool = Field(default=True, description="With prompt: add the tokens that start a sequence.")
    add_generation_prompt: bool = Field(default=True, description="With messages: end with the start of a response.")
    chat_template_kwargs: TemplateVariables | None = described("With messages: variables of the chat template.")
    return_token_strs: bool = Field(default=False, description="Return the text of each token, too.")


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    tokens: FailFastList[int] = Field(description="Token ids.", examples=[[19556, 28, 905]])
