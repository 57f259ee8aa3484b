"""What replies look like, for the API's own description; they are made in replies*.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorBody


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = Field(default=None, description="Only where prediction was sent.")
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(BaseModel):
    """llama.cpp's; milliseconds. `draft_n` is there where somebody may guess."""

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


class Speculation(BaseModel):
    rule: str
    lossless: bool
    seeds: list[int]
    drafters: dict[str, dict[str, int]]
    skipped: dict[str, int]


class Reply(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: Timings
    metrics: dict[str, Any] | None = Field(default=None, description="vLLM's speculative_decoding.")
    speculation: Speculation


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Chances(BaseModel):
    id: int
    text: str
    probability: float = Field(description="The target's, with the request's settings; at temperature 0 the scores'.")
    draft_confidence: float | None = Field(description="How sure the drafter was, from 0 to 1.")
    draft_probability: float | None = Field(description="The same, where it is the probability it guessed with.")


class TokenDetails(Chances):
    origin: str
    rejected: list[Chances] = Field(description="Guesses that fell at this place.")


class Round(BaseModel):
    """A step of the text; milliseconds."""

    tokens: int
    drafted: int
    accepted: int
    drafter: str | None
    skipped: str | None = Field(description="Why nothing was guessed.")
    at_ms: float | None = Field(default=None, description="When it ended, since the prompt was taken up.")
    step_ms: float | None = None
    drafting_ms: float | None = None
    target_ms: float | None = None
    plain_ms: float | None = Field(default=None, description="What the step would take without guesses, where known.")
    texts: int | None = Field(default=None, description="Texts that grew in it.")


class Choice(BaseModel):
    """What is told of tokens, where it was asked for."""

    token_ids: list[int] | None = None
    origins: list[str] | None = None
    token_texts: list[str] | None = None
    token_details: list[TokenDetails] | None = None
    rounds: list[Round] | None = None


class ChatChoice(Choice):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(Reply):
    choices: list[ChatChoice]


class TextChoice(Choice):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletion(Reply):
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


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Prompt(BaseModel):
    prompt: str


class Standing(BaseModel):
    status: str
    reason: str | None = None


class Version(BaseModel):
    version: str
