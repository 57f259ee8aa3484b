"""Response bodies for the OpenAPI schema; `response_builder.py` builds them as dictionaries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorBody(BaseModel):
    """An error: what is wrong, and what would work."""

    message: str = Field(description="One line: what is wrong; what would work.")
    type: str = Field(description="OpenAI's class of the error, such as invalid_request_error.")
    param: str | None = Field(description="The request field at fault, if there is one.")
    code: str | None = Field(description="A short name of the error, such as invalid_value.")


class ErrorResponse(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody = Field(description="The error.")


class PromptDetails(BaseModel):
    """Parts of the prompt tokens."""

    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")


class CompletionDetails(BaseModel):
    """Parts of the output tokens."""

    reasoning_tokens: int = Field(description="Output tokens of the reasoning.")
    accepted_prediction_tokens: int | None = Field(
        default=None, description="Accepted tokens of the request's prediction; present if it has one."
    )
    rejected_prediction_tokens: int | None = Field(
        default=None, description="Rejected tokens of the request's prediction; present if it has one."
    )


class Usage(BaseModel):
    """OpenAI's token counts. Rejected draft tokens never count."""

    prompt_tokens: int = Field(description="Prompt tokens; a prompt counts once however many choices it has.")
    completion_tokens: int = Field(description="Output tokens of all choices.")
    total_tokens: int = Field(description="Prompt and output tokens.")
    prompt_tokens_details: PromptDetails = Field(description="Those found in the prefix cache.")
    completion_tokens_details: CompletionDetails = Field(description="Those of the reasoning and of a prediction.")


class TimingInfo(BaseModel):
    """llama.cpp's timings, in milliseconds."""

    cache_n: int = Field(description="Prompt tokens found in the prefix cache.")
    prompt_n: int = Field(description="Prompt tokens that were prefilled.")
    prompt_ms: float = Field(description="Time of the prefill.")
    prompt_per_token_ms: float = Field(description="Time of the prefill per token.")
    prompt_per_second: float = Field(description="Prefilled tokens per second.")
    predicted_n: int = Field(description="Output tokens.")
    predicted_ms: float = Field(description="Time from the first output token to the last.")
    predicted_per_token_ms: float = Field(description="Decode time per token after the first.")
    predicted_per_second: float = Field(description="Decoded tokens per second.")
    draft_n: int | None = Field(default=None, description="Draft tokens; present if drafting was allowed.")
    draft_n_accepted: int | None = Field(default=None, description="Accepted ones; present if drafting was allowed.")


class SpeculationInfo(BaseModel):
    """Drafting and verification of the output: rule, seeds, and counts by drafter."""

    rule: str = Field(description="Verification rule.")
    lossless: bool = Field(description="Whether output or distribution are exactly the target's.")
    seeds: list[int] = Field(description="Seed of each choice.")
    drafters: dict[str, dict[str, int]] = Field(description="Drafted and accepted tokens by drafter.")
    skipped: dict[str, int] = Field(description="Steps without a draft, by reason.")


class CompletionResponse(BaseModel):
    """The fields shared by chat completions and completions."""

    id: str = Field(description="Id of the response.")
    object: str = Field(description="Type of the response, as OpenAI names it.")
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="Name of the model.")
    system_fingerprint: str = Field(description="Name and version of the server.")
    usage: Usage = Field(description="OpenAI's token counts.")
    timings: TimingInfo = Field(description="llama.cpp's timings.")
    metrics: dict[str, Any] | None = Field(
        default=None, description="vLLM's `speculative_decoding` statistics; present if drafting was allowed."
    )
    speculation: SpeculationInfo = Field(description="Rule, drafters and draft tokens of this response.")


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: str = Field(description="Always `assistant`.")
    content: str | None = Field(description="The text; null if there are only tool calls.")
    refusal: str | None = Field(description="Always null.")
    reasoning_content: str | None = Field(default=None, description="The reasoning, if the model has one.")
    tool_calls: list[dict[str, Any]] | None = Field(default=None, description="Calls in OpenAI's shape.")


class TokenProbabilities(BaseModel):
    """A token with the target's and the drafter's probability."""

    id: int = Field(description="Token id.")
    text: str = Field(description="The characters that the token adds.")
    probability: float = Field(
        description="Target probability after the sampling parameters; at temperature 0, the softmax of the logits."
    )
    draft_confidence: float | None = Field(description="The drafter's confidence, from 0 to 1.")
    draft_probability: float | None = Field(description="The drafter's probability, if its confidence is one.")


class TokenDetails(TokenProbabilities):
    """A token of the output, with the draft tokens rejected at its position."""

    origin: str = Field(description="The drafter whose draft token was accepted, or `target`.")
    rejected: list[TokenProbabilities] = Field(description="Rejected draft tokens at this position.")


class SpeculationRound(BaseModel):
    """One step of a sequence; times in milliseconds."""

    tokens: int = Field(description="Output tokens of the step.")
    drafted: int = Field(description="Draft tokens that were verified.")
    accepted: int = Field(description="Accepted ones among the output tokens.")
    drafter: str | None = Field(description="The drafter of the draft.")
    skipped: str | None = Field(description="Why the step had no draft.")
    at_ms: float | None = Field(default=None, description="End of the step, since the start of prefill.")
    step_ms: float | None = Field(default=None, description="Time of the step.")
    drafting_ms: float | None = Field(default=None, description="Its part for drafting.")
    target_ms: float | None = Field(default=None, description="Its part for the target's forward pass.")
    plain_ms: float | None = Field(default=None, description="Estimated time of the step without drafts, if known.")
    texts: int | None = Field(default=None, description="Sequences that got tokens in the step.")


class ChoiceDetails(BaseModel):
    """Per-token fields of a choice; present if requested."""

    token_ids: list[int] | None = Field(default=None, description="With return_token_origin: the output's token ids.")
    token_origins: list[str] | None = Field(
        default=None, description="With return_token_origin: the drafter of each token, or `target`."
    )
    token_texts: list[str] | None = Field(
        default=None, description="With return_token_origin: the characters that each token adds."
    )
    token_details: list[TokenDetails] | None = Field(default=None, description="With return_token_details.")
    rounds: list[SpeculationRound] | None = Field(
        default=None, description="With return_rounds or return_token_details: the steps of the sequence."
    )


class ChatChoice(ChoiceDetails):
    """One of the n outputs. A chunk of a stream has `delta`, a part of the message, instead of `message`."""

    index: int = Field(description="Number of the choice, from 0.")
    message: ChatMessage = Field(description="The output as a message of the assistant.")
    logprobs: dict[str, Any] | None = Field(description="Logprobs of the tokens in OpenAI's shape, if requested.")
    finish_reason: str = Field(description="stop, length (the token limit) or tool_calls.")


class ChatCompletion(CompletionResponse):
    """The response of /v1/chat/completions."""

    choices: list[ChatChoice] = Field(description="The n outputs.")


class TextChoice(ChoiceDetails):
    """One of the n outputs of a prompt."""

    index: int = Field(description="Number of the choice: n for each prompt, in order.")
    text: str = Field(description="The output, after the prompt with echo.")
    logprobs: dict[str, Any] | None = Field(description="Logprobs of the tokens in OpenAI's shape, if requested.")
    finish_reason: str = Field(description="stop or length (the token limit).")


class TextCompletion(CompletionResponse):
    """The response of /v1/completions."""

    choices: list[TextChoice] = Field(description="The outputs.")


class ModelCard(BaseModel):
    """A name of the served model."""

    id: str = Field(description="The name to use as `model`.")
    object: str = Field(description="Always `model`.")
    created: int = Field(description="Unix time of the server's start in seconds.")
    owned_by: str = Field(description="Always `foretell`.")
    root: str = Field(description="The model as given at the start.")
    max_model_len: int = Field(description="Context length in tokens.")
    drafter: str = Field(description="Drafter, or mix for several.")


class ModelList(BaseModel):
    """All names of the served model."""

    object: str = Field(description="Always `list`.")
    data: list[ModelCard] = Field(description="The names.")


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Context length in tokens.")
    tokens: list[int] | list[dict[str, Any]] = Field(description="Token ids; with_pieces: also their text.")
    token_strs: list[str] | None = Field(default=None, description="With return_token_strs: the text of each token.")


class DetokenizeResponse(BaseModel):
    """The text that token ids stand for."""

    prompt: str = Field(description="The text.")
    content: str = Field(description="The same, in llama.cpp's name.")


class HealthStatus(BaseModel):
    """The state of the server, for health checks."""

    status: str = Field(description="`ok` or `unavailable`.")
    reason: str | None = Field(default=None, description="Why it is unavailable.")


class VersionInfo(BaseModel):
    """The version of this server."""

    version: str = Field(description="Version of Foretell.")
