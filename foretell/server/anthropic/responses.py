"""Response bodies of Anthropic's API for the OpenAPI schema; `message_builder.py` builds them as dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from foretell.server.openai.responses import SpeculationInfo, TimingInfo


class MessageUsage(BaseModel):
    """Anthropic's token counts. Rejected draft tokens never count."""

    input_tokens: int = Field(description="Prompt tokens that were prefilled.")
    cache_creation_input_tokens: int = Field(description="Always 0: every prefix is cached.")
    cache_read_input_tokens: int = Field(description="Prompt tokens found in the prefix cache.")
    output_tokens: int = Field(description="Output tokens.")


class Message(BaseModel):
    """The assistant's message."""

    id: str = Field(description="Id of the message.")
    type: Literal["message"] = Field(description="Always `message`.")
    role: Literal["assistant"] = Field(description="Always `assistant`.")
    model: str = Field(description="Name of the model.")
    content: list[dict[str, Any]] = Field(description="Blocks of type text, thinking and tool_use.")
    stop_reason: str = Field(description="end_turn, max_tokens, stop_sequence or tool_use.")
    stop_sequence: str | None = Field(description="The stop string at which it ended.")
    usage: MessageUsage = Field(description="Token counts.")
    timings: TimingInfo = Field(description="llama.cpp's timings.")
    metrics: dict[str, Any] | None = Field(
        default=None, description="vLLM's `speculative_decoding` statistics; present if drafting was allowed."
    )
    speculation: SpeculationInfo = Field(description="Rule, drafters and draft tokens of this response.")


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int = Field(description="Prompt tokens, with the chat template.")


class AnthropicErrorBody(BaseModel):
    """Class and message of an error."""

    type: str = Field(description="Anthropic's class of the error, such as invalid_request_error.")
    message: str = Field(description="One line: what is wrong; what would work.")


class AnthropicError(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"] = Field(description="Always `error`.")
    error: AnthropicErrorBody = Field(description="The error.")
