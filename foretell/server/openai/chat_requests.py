"""Parsed request bodies of /v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.server.openai.requests import FailFastList, GenerationRequest, StrictModel, ranged

Role = Literal["system", "developer", "user", "assistant", "tool"]


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessageParam(BaseModel):
    """A message of a conversation. Clients send responses back, so unknown fields are ignored here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Role
    content: str | FailFastList[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def reject_unsupported_content(cls, data: Any) -> Any:
        """Reject audio and OpenAI's deprecated function calls, whose meaning would be lost."""
        for name in ("audio", "function_call"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise ValueError(f"{name} is not supported by this model; send text or tool_calls")
        return data


class FunctionDefinition(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: FailFastList[ChatMessageParam] = Field(min_length=1)
    max_completion_tokens: int | None = ranged(1)
    logprobs: bool | None = None
    top_logprobs: int | None = ranged(0, 20)
    tools: FailFastList[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false returns only the first tool call.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        default=None, description="A chat template variable; rejected if the template does not use it."
    )
    include_reasoning: bool | None = None
    thinking_budget: int | None = ranged(0)
    thinking_token_budget: int | None = Field(default=None, description="Alias of thinking_budget.")


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: FailFastList[ChatMessageParam] | None = None
    tools: FailFastList[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: FailFastList[int]
