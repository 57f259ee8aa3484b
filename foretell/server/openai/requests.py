"""What requests may say, in the words of OpenAI, vLLM and llama.cpp. What is not known here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

T = TypeVar("T")

MOST_LISTED = 1024  # entries of a field that every step of a text looks at
Listed = Annotated[list[T], Field(fail_fast=True)]  # read up to the first wrong entry: a body may have a million

# Fields that ask for nothing when they say this; anything else in them is refused, because it would change the answer.
NEUTRAL: dict[str, Any] = {
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

# What people ask for that is not here, and what would do.
REFUSED: dict[str, str] = {
    "audio": "this model writes text only; leave it out",
    "best_of": "the best of several texts is not chosen here; ask for n texts and choose",
    "chat_template": "the model's own template is used; pass variables in chat_template_kwargs",
    "continue_final_message": "an answer cannot be continued here; use /v1/completions with the rendered text",
    "function_call": "is OpenAI's old name; use tool_choice",
    "functions": "is OpenAI's old name; use tools",
    "length_penalty": "belongs to beam search, which is not here",
    "logits_processors": "cannot be sent over HTTP; use the Python interface",
    "modalities": "this model writes text only",
    "suffix": "filling a gap is not supported; put the text before it into prompt",
    "truncate_prompt_tokens": "prompts are never cut; send a shorter one",
    "use_beam_search": "beam search is not here; ask for n texts",
    "web_search_options": "this server searches nothing; use tools",
}


def between(minimum: float, maximum: float | None = None) -> Any:
    """A field whose range stands in the API's description; the engine's own values check it, in better words."""
    limits = {"minimum": minimum, "maximum": maximum}
    return Field(default=None, json_schema_extra={name: each for name, each in limits.items() if each is not None})


class Strict(BaseModel):
    """Takes JSON's own kinds and no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def keep_one_unknown_name(cls, data: Any) -> Any:
        """One is enough to refuse, and each would be told at length."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in data if name not in known]
        return {name: value for name, value in data.items() if name in known or name == unknown[0]}


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(default=False, description="Accepted; nothing is obfuscated.")


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's form: one of the first five."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = Field(default=None, description="A Lark grammar.")
    disable_any_whitespace: bool = False


class Prediction(Strict):
    """OpenAI's Predicted Outputs: the text that is expected, copied wherever the model agrees."""

    type: Literal["content"] = "content"
    content: str | Listed[dict[str, Any]]


class Speculative(Strict):
    """How this request wants to be speculated on; what is left out is the server's own."""

    enabled: bool = True
    drafter: str | None = None
    method: str | None = Field(default=None, description="Another name of drafter.")
    max_draft: int | None = between(0, 64)
    n_max: int | None = Field(default=None, description="Another name of max_draft.")
    n_min: int | None = Field(default=None, description="Accepted; what is worth checking is measured.")
    p_min: float | None = Field(default=None, description="Accepted; what is worth checking is measured.")
    deadline: float | None = Field(default=None, description="Seconds in which the text should be written.")
    min_tokens_per_second: float | None = Field(default=None, description="The text should not come slower.")
    rule: str | None = None
    acceptance_threshold: float | None = None
    acceptance_threshold_lower: float | None = None
    workload: str | None = None


class Harmless(Strict):
    """Fields that clients send and that change nothing here."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    priority: Any = None


class Generation(Harmless):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = between(1, 128)
    temperature: float | None = between(0, 100)
    top_p: float | None = between(0.001, 1)
    top_k: int | None = between(-1)
    min_p: float | None = between(0, 1)
    presence_penalty: float | None = between(-2, 2)
    frequency_penalty: float | None = between(-2, 2)
    repetition_penalty: float | None = between(0.01, 100)
    max_tokens: int | None = between(1)
    min_tokens: int | None = between(0)
    seed: int | None = between(-(2**63), 2**63 - 1)
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Listed[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Listed[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    prediction: Prediction | None = None
    speculative: bool | Speculative | None = None
    speculative_n_max: int | None = Field(default=None, alias="speculative.n_max")
    speculative_n_min: int | None = Field(default=None, alias="speculative.n_min")
    speculative_p_min: float | None = Field(default=None, alias="speculative.p_min")
    cache_salt: str | None = Field(default=None, description="Texts with another salt share no cache with this one.")
    return_token_origin: bool | None = Field(default=None, description="Tell of each token who proposed it.")
    return_token_details: bool | None = Field(
        default=None,
        description="Tell how likely each token was found and which guesses fell there; return_rounds too.",
    )
    return_rounds: bool | None = Field(default=None, description="Tell of each step what was guessed and what it took.")
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = Field(
        default=None, description="Tell in a stream's first chunk what of the prompt was read and what was known."
    )

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, data: Any) -> Any:
        """null is as good as left out, and so is a field that says what would be done anyway."""
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None and not is_neutral(name, value)}
        if kept.get("best_of") == kept.get("n", 1):
            kept.pop("best_of", None)
        return kept

    @field_validator("logit_bias", "bad_words", "stop_token_ids", mode="before")
    @classmethod
    def refuse_endless_lists(cls, value: Any) -> Any:
        """Every step looks at each entry."""
        if isinstance(value, dict | list) and len(value) > MOST_LISTED:
            raise ValueError(f"has {len(value)} entries; at most {MOST_LISTED} are taken")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field that is not supported asks for just what is done anyway."""
    neutral = NEUTRAL.get(name)
    return neutral is not None and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: int | None = between(0, 20)
    max_tokens: int | None = between(0)
