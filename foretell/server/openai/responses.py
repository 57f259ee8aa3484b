"""Response bodies for the OpenAPI schema; `response_builder.py` builds them as dictionaries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = Field(default=None, description="Present if the request has a prediction.")
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingInfo(BaseModel):
    """llama.cpp's timings, in milliseconds. `draft_n` is present if drafting was allowed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class SpeculationInfo(BaseModel):
    rule: str
    lossless: bool
    seeds: list[int]
    drafters: dict[str, dict[str, int]]
    skipped: dict[str, int]


class CompletionResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: TimingInfo
    metrics: dict[str, Any] | None = Field(default=None, description="vLLM's speculative_decoding statistics.")
    speculation: SpeculationInfo


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class TokenProbabilities(BaseModel):
    id: int
    text: str
    probability: float = Field(
        description="Target probability after the sampling parameters; at temperature 0, the softmax of the logits."
    )
    draft_confidence: float | None = Field(description="The drafter's confidence, from 0 to 1.")
    draft_probability: float | None = Field(description="The drafter's probability, if its confidence is one.")


class TokenDetails(TokenProbabilities):
    origin: str
    rejected: list[TokenProbabilities] = Field(description="Rejected draft tokens at this position.")


class SpeculationRound(BaseModel):
    """One step of a sequence; times in milliseconds."""

    tokens: int
    drafted: int
    accepted: int
    drafter: str | None
    skipped: str | None = Field(description="Why the step had no draft.")
    at_ms: float | None = Field(default=None, description="End of the step, since the start of prefill.")
    step_ms: float | None = None
    drafting_ms: float | None = None
    target_ms: float | None = None
    plain_ms: float | None = Field(default=None, description="Estimated time of the step without drafts, if known.")
    texts: int | None = Field(default=None, description="Sequences that got tokens in the step.")


class ChoiceDetails(BaseModel):
    """Per-token fields of a choice; present if requested."""

    token_ids: list[int] | None = None
    token_origins: list[str] | None = None
    token_texts: list[str] | None = None
    token_details: list[TokenDetails] | None = None
    rounds: list[SpeculationRound] | None = None


class ChatChoice(ChoiceDetails):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(CompletionResponse):
    choices: list[ChatChoice]


class TextChoice(ChoiceDetails):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletion(CompletionResponse):
    choices: list[TextChoice]


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    drafter: str


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class HealthStatus(BaseModel):
    status: str
    reason: str | None = None


class VersionInfo(BaseModel):
    version: str
