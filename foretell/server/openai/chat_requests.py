"""What chats and the tokenizer's endpoints may say."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.server.openai.requests import Generation, Listed, Strict, between

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


class Message(BaseModel):
    """Clients send back what they were sent, so that unknown names are left out of account here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Role
    content: str | Listed[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_what_cannot_be_read(cls, data: Any) -> Any:
        """Sound and old-style calls carry meaning that would be lost."""
        for name in ("audio", "function_call"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise ValueError(f"{name} cannot be read by this model; send text, or tool_calls")
        return data


class Function(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: int | None = between(1)
    logprobs: bool | None = None
    top_logprobs: int | None = between(0, 20)
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false keeps the first call only.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, description="For templates that read it; others refuse it.")
    include_reasoning: bool | None = None
    thinking_budget: int | None = between(0)
    thinking_token_budget: int | None = Field(default=None, description="Another name of thinking_budget.")


class TokenizeBody(Strict):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = None
    tools: Listed[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[int]
