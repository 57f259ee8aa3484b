"""Response bodies of the Responses API for the OpenAPI schema; `builder.py` builds them as dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from foretell.server.openai.responses import SpeculationInfo, TimingInfo


class ResponseUsage(BaseModel):
    """OpenAI's token counts. Rejected draft tokens never count."""

    input_tokens: int = Field(description="Prompt tokens.")
    input_tokens_details: dict[str, int] = Field(description="`cached_tokens`: those found in the prefix cache.")
    output_tokens: int = Field(description="Output tokens.")
    output_tokens_details: dict[str, int] = Field(description="`reasoning_tokens`: those of the reasoning.")
    total_tokens: int = Field(description="Prompt and output tokens.")


class ResponseBody(BaseModel):
    """A response, with the settings of its request."""

    id: str = Field(description="Id of the response, for previous_response_id.")
    object: Literal["response"] = Field(description="Always `response`.")
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None = Field(description="Unix time in seconds.")
    status: str = Field(description="completed, or incomplete (the token limit).")
    incomplete_details: dict[str, Any] | None = Field(description="`reason`: max_output_tokens.")
    error: dict[str, Any] | None = Field(description="Why it failed; only in streams.")
    model: str = Field(description="Name of the model.")
    output: list[dict[str, Any]] = Field(description="Items: message, reasoning, function_call.")
    previous_response_id: str | None = Field(description="The response that it continues.")
    store: bool = Field(description="Whether it is stored.")
    usage: ResponseUsage | None = Field(description="Token counts.")
    timings: TimingInfo = Field(description="llama.cpp's timings.")
    metrics: dict[str, Any] | None = Field(
        default=None, description="vLLM's `speculative_decoding` statistics; present if drafting was allowed."
    )
    speculation: SpeculationInfo = Field(description="Rule, drafters and draft tokens of this response.")


class DeletedResponse(BaseModel):
    """A response that is no longer stored."""

    id: str = Field(description="Its id.")
    object: Literal["response"] = Field(description="Always `response`.")
    deleted: bool = Field(description="Always true.")


class InputTokenCount(BaseModel):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = Field(description="Always `response.input_tokens`.")
    input_tokens: int = Field(description="Prompt tokens, with the chat template and the earlier conversation.")
