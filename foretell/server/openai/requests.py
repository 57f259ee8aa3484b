"""Request bodies of /v1/completions and the fields shared with chats: OpenAI's, vLLM's and llama.cpp's names.

Unknown fields are rejected by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

T = TypeVar("T")

MAX_LIST_ENTRIES = 1024  # of a list or map that the sampler goes through in every step
FailFastList = Annotated[list[T], Field(fail_fast=True)]  # validation stops at the first error of a long list

# Unsupported fields that are accepted with this value, which is the default; other values would change the output.
NEUTRAL_VALUES: dict[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "cache_prompt": True,
    "continue_final_message": False,
    "dry_multiplier": 0,
    "early_stopping": False,
    "functions": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "mirostat": 0,
    "modalities": ["text"],
    "spaces_between_special_tokens": True,
    "tfs_z": 1,
    "typical_p": 1,
    "use_beam_search": False,
    "verbosity": "medium",
    "xtc_probability": 0,
}

# Unsupported fields, each with the reason or an alternative for the error message.
UNSUPPORTED_FIELDS: dict[str, str] = {
    "audio": "this model generates text only; leave the field out",
    "best_of": "is not supported; request n choices and rank them in the client",
    "chat_template": "cannot be replaced per request; pass template variables in chat_template_kwargs",
    "continue_final_message": "is not supported; use /v1/completions with the rendered prompt",
    "function_call": "is deprecated by OpenAI; use tool_choice",
    "functions": "is deprecated by OpenAI; use tools",
    "length_penalty": "applies to beam search, which is not supported",
    "logits_processors": "cannot be sent over HTTP; use the Python interface",
    "modalities": "this model generates text only",
    "suffix": "fill-in-the-middle is not supported; put the text before the gap into prompt",
    "truncate_prompt_tokens": "prompts are never truncated; send a shorter one",
    "use_beam_search": "beam search is not supported; request n choices",
    "web_search_options": "web search is not supported; use tools",
}


def ranged(minimum: float, maximum: float | None = None) -> Any:
    """Return an optional field with its range in the OpenAPI schema; SamplingParams checks it with a clearer error."""
    limits = {"minimum": minimum, "maximum": maximum}
    return Field(default=None, json_schema_extra={name: limit for name, limit in limits.items() if limit is not None})


class StrictModel(BaseModel):
    """A model that converts no types and allows no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def keep_first_unknown_field(cls, data: Any) -> Any:
        """Drop unknown fields but the first: one is enough for the error, and validation reports each at length."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in data if name not in known]
        return {name: value for name, value in data.items() if name in known or name == unknown[0]}


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(default=False, description="Accepted without effect.")


class JsonSchema(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's structured outputs; exactly one of the first five fields must be set."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: str | None = Field(default=None, description="A Lark grammar.")
    disable_any_whitespace: bool = False


class Prediction(StrictModel):
    """OpenAI's predicted outputs: the expected text, used as draft."""

    type: Literal["content"] = "content"
    content: str | FailFastList[dict[str, Any]]


class Speculative(StrictModel):
    """Speculative decoding settings of this request; fields left out keep the server's settings."""

    enabled: bool = True
    drafter: str | None = None
    method: str | None = Field(default=None, description="Alias of drafter.")
    max_draft: int | None = ranged(0, 64)
    n_max: int | None = Field(default=None, description="Alias of max_draft.")
    n_min: int | None = Field(default=None, description="Accepted without effect: the draft length is adaptive.")
    p_min: float | None = Field(default=None, description="Accepted without effect: the draft length is adaptive.")
    deadline: float | None = Field(default=None, description="SLO: seconds until the output should be complete.")
    min_tokens_per_second: float | None = Field(default=None, description="SLO: minimum decode speed of this request.")
    rule: str | None = None
    acceptance_threshold: float | None = None
    acceptance_threshold_lower: float | None = None
    workload: str | None = None


class IgnoredFields(StrictModel):
    """Fields that clients send and that have no effect here."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    priority: Any = None


class GenerationRequest(IgnoredFields):
    """The fields shared by chat completions and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = ranged(1, 128)
    temperature: float | None = ranged(0, 100)
    top_p: float | None = ranged(0.001, 1)
    top_k: int | None = ranged(-1)
    min_p: float | None = ranged(0, 1)
    presence_penalty: float | None = ranged(-2, 2)
    frequency_penalty: float | None = ranged(-2, 2)
    repetition_penalty: float | None = ranged(0.01, 100)
    max_tokens: int | None = ranged(1)
    min_tokens: int | None = ranged(0)
    seed: int | None = ranged(-(2**63), 2**63 - 1)
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: FailFastList[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: FailFastList[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None
    prediction: Prediction | None = None
    speculative: bool | Speculative | None = None
    speculative_n_max: int | None = Field(default=None, alias="speculative.n_max")
    speculative_n_min: int | None = Field(default=None, alias="speculative.n_min")
    speculative_p_min: float | None = Field(default=None, alias="speculative.p_min")
    cache_salt: str | None = Field(
        default=None, description="Requests share the prefix cache only with those of the same salt."
    )
    return_token_origin: bool | None = Field(default=None, description="Return the drafter of each token, or target.")
    return_token_details: bool | None = Field(
        default=None,
        description="Return each token's probability and the draft tokens rejected there; implies return_rounds.",
    )
    return_rounds: bool | None = Field(
        default=None, description="Return drafted and accepted tokens and times of each step."
    )
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = Field(
        default=None, description="Return the prefilled and cached prompt tokens in the first chunk of a stream."
    )

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, data: Any) -> Any:
        """Drop fields that are null and unsupported fields with their neutral value."""
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None and not is_neutral(name, value)}
        if kept.get("best_of") == kept.get("n", 1):
            kept.pop("best_of", None)
        return kept

    @field_validator("logit_bias", "bad_words", "stop_token_ids", mode="before")
    @classmethod
    def limit_list_length(cls, value: Any) -> Any:
        """Reject long lists: the sampler goes through every entry in every step."""
        if isinstance(value, dict | list) and len(value) > MAX_LIST_ENTRIES:
            raise ValueError(f"has {len(value)} entries; at most {MAX_LIST_ENTRIES} are allowed")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def is_neutral(name: str, value: Any) -> bool:
    """Return whether an unsupported field has the value that changes nothing."""
    neutral = NEUTRAL_VALUES.get(name)
    return neutral is not None and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    echo: bool | None = None
    logprobs: int | None = ranged(0, 20)
    max_tokens: int | None = ranged(0)
