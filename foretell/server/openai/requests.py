"""Request bodies of /v1/completions and the fields shared with chats: OpenAI's, vLLM's and llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, field_validator, model_validator

from foretell.sampling_params import SamplingParams
from foretell.server.json_schemas import (
    MAX_LIST_ENTRIES,
    NULL,
    ONE_FORMAT,
    Choice,
    Grammar,
    LogitBias,
    Rule,
    SchemaOrText,
    SchemaValue,
    Stop,
    TextPart,
    Word,
    Workload,
    also,
    any_of,
    given,
    unless,
)
from foretell.server.request_model import StrictModel, without_nulls

T = TypeVar("T")

FailFastList = Annotated[list[T], Field(fail_fast=True)]  # validation stops at the first error of a long list
# The same where a later check refuses an empty list, or a long one, with a clearer error.
NonEmptyList = Annotated[list[T], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
LimitedList = Annotated[list[T], Field(fail_fast=True, json_schema_extra={"maxItems": MAX_LIST_ENTRIES})]

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
    "suffix": "",
    "tfs_z": 1,
    "typical_p": 1,
    "use_beam_search": False,
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
    "truncate_prompt_tokens": "prompts are never truncated; send a shorter one",
    "use_beam_search": "beam search is not supported; request n choices",
    "web_search_options": "web search is not supported; use tools",
}


# Other servers' names of fields: ignoring them would lose what they ask for.
OTHER_NAMES = {
    "grammar": "guided_grammar",
    "json_schema": "response_format",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_sequence": "stop",
}
UNSUPPORTED_FIELDS |= {name: f"is not known; did you mean {ours!r}?" for name, ours in OTHER_NAMES.items()}

WITHOUT_EFFECT = "Accepted without effect."  # begins the description of such a field
SAMPLING_HELP = {field.name: field.metadata.get("help", "") for field in fields(SamplingParams)}


def described(description: str) -> Any:
    """Return an optional field with a description for the OpenAPI schema."""
    return Field(default=None, description=description)


def ranged(
    description: str, minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> Any:
    """Return an optional field with its range in the OpenAPI schema; SamplingParams checks it with a clearer error."""
    limits = {"minimum": minimum, "exclusiveMinimum": above, "maximum": maximum}
    schema: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    return Field(default=None, description=description, json_schema_extra=schema)


def sampling(
    name: str, minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> Any:
    """Return an optional field with the description of this sampling parameter."""
    text = SAMPLING_HELP[name]
    return ranged(f"{text[0].upper()}{text[1:]}.", minimum, maximum, above=above)


def ignored(description: str) -> Any:
    """Return a field that is accepted without effect."""
    return Field(default=None, description=f"{WITHOUT_EFFECT} {description}")


def order_properties(schema: dict[str, Any]) -> None:
    """Move the required properties of a schema to its start and those without effect to its end."""
    properties, required = schema["properties"], schema.get("required", ())

    def place(name: str) -> tuple[bool, bool]:
        return name not in required, properties[name].get("description", "").startswith(WITHOUT_EFFECT)

    schema["properties"] = {name: properties[name] for name in sorted(properties, key=place)}


class StreamOptions(StrictModel):
    """Parts of a stream besides the output."""

    path = "stream_options."

    include_usage: bool = Field(default=False, description="Send `usage` in a last chunk without choices.")
    continuous_usage_stats: bool = Field(default=False, description="Send `usage` in every chunk.")
    include_obfuscation: bool = Field(default=False, description="Accepted without effect.")


class JsonSchema(StrictModel):
    """A named JSON schema."""

    path = "response_format.json_schema."

    name: str | None = described("A name for the schema; it has no effect.")
    description: str | None = described("What the output is for; it has no effect.")
    schema_: SchemaValue = Field(alias="schema", description="The JSON schema of the output.")
    strict: bool | None = described("The schema is always enforced, so this has no effect.")


class ResponseFormat(StrictModel):
    """OpenAI's format of the output."""

    model_config = ConfigDict(
        json_schema_extra=also(
            unless({"properties": {"type": {"not": {"const": "json_schema"}}}}, given(json_schema={"type": "object"}))
        )
    )
    path = "response_format."

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`text` for any output, `json_object` for any JSON object, `json_schema` for a schema."
    )
    json_schema: JsonSchema | None = described("The schema, if `type` is `json_schema`.")


def _one_of_five(schema: dict[str, Any]) -> None:
    names = ("json", "json_object", "regex", "choice", "grammar")
    unset = {**dict.fromkeys(names, NULL), "json_object": {"enum": [None, False]}}
    kinds = {"json": {"not": NULL}, "json_object": {"const": True}, "choice": {"type": "array"}}
    chosen = ({**unset, name: kinds.get(name, {"type": "string"})} for name in names)
    also(any_of(*({"properties": each, "required": [name]} for name, each in zip(names, chosen, strict=True))))(schema)


class StructuredOutputs(StrictModel):
    """vLLM's structured outputs; exactly one of the first five fields must be set."""

    model_config = ConfigDict(json_schema_extra=_one_of_five)
    path = "structured_outputs."

    json_: SchemaOrText | None = Field(
        default=None, alias="json", description="A JSON schema, as an object or as text."
    )
    json_object: bool | None = described("true: any JSON object.")
    regex: Grammar | None = described("A regular expression that the entire output matches.")
    choice: NonEmptyList[Choice] | None = described("The output is one of these strings.")
    grammar: Grammar | None = described("A Lark grammar.")
    disable_any_whitespace: bool = Field(default=False, description="Generate JSON on one line, as json.dumps does.")


class Prediction(StrictModel):
    """OpenAI's predicted outputs: the expected text, used as draft."""

    path = "prediction."

    type: Literal["content"] = Field(default="content", description="Always `content`.")
    content: str | FailFastList[TextPart] = Field(description="The expected text, as a string or as text parts.")

    @field_validator("content")
    @classmethod
    def check_parts(cls, content: str | list[TextPart]) -> str | list[TextPart]:
        """Refuse parts without text here, because not every API that takes a prediction generates with it."""
        parts = () if isinstance(content, str) else content
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            raise ValueError("must be a string, or parts of type text")
        return content

    @property
    def expected(self) -> str:
        """Return the text, of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)


CONFIDENCE = given(rule={"const": "confidence"})
THRESHOLDS = ("acceptance_threshold", "acceptance_threshold_lower")
# Both thresholds or none; they and the workload belong to one rule.
CONFIDENT = also(
    unless({"properties": dict.fromkeys((*THRESHOLDS, "workload"), NULL)}, CONFIDENCE),
    unless({"properties": dict.fromkeys(THRESHOLDS, NULL)}, given(**dict.fromkeys(THRESHOLDS, {"type": "number"}))),
)


class Speculative(StrictModel):
    """Speculative decoding settings of this request; fields left out keep the server's settings."""

    model_config = ConfigDict(json_schema_extra=CONFIDENT)
    path = "speculative."

    enabled: bool = Field(default=True, description="false: plain decoding, without draft tokens.")
    drafter: str | None = described("One of the server's drafters, or several with commas; `/server_info` lists them.")
    method: str | None = described("Alias of drafter.")
    max_draft: int | None = ranged("Maximum draft tokens per step, up to the server's own limit.", 0, 64)
    n_max: int | None = ranged("Alias of max_draft.", 0, 64)
    n_min: int | None = ranged("Accepted without effect: the draft length is adaptive.", 0, 64)
    p_min: float | None = ranged("Accepted without effect: the draft length is adaptive.", 0, 1)
    deadline: float | None = ranged("SLO: seconds until the output should be complete.", above=0, maximum=86_400)
    min_tokens_per_second: float | None = ranged("SLO: minimum decode speed of this request.", above=0, maximum=10_000)
    rule: Rule | None = described(
        "Verification rule. Lossless: match, rejection, block, auto. Lossy: confidence, typical, ensemble."
    )
    acceptance_threshold: float | None = ranged("Rule confidence: accept from this draft probability on.", 0, 1)
    acceptance_threshold_lower: float | None = ranged("Rule confidence: reject below this draft probability.", 0, 1)
    workload: Workload | None = described("Rule confidence: preset of the threshold: code, json, narrative or auto.")

    @classmethod
    def may_ignore(cls, name: str, known: Iterable[str]) -> bool:
        """Refuse all unknown settings: these are ours, so that a client that sends one means it."""
        return False


class IgnoredFields(StrictModel):
    """Fields that clients send and that have no effect here."""

    user: Any = ignored("The end user's id.")
    metadata: Any = ignored("Labels of a stored completion.")
    store: Any = ignored("Nothing is stored.")
    service_tier: Any = ignored("There is one tier.")
    safety_identifier: Any = ignored("The end user's id.")
    prompt_cache_key: Any = ignored("Prefixes are cached by their tokens; see cache_salt.")
    prompt_cache_retention: Any = ignored("The least recently used prefixes are evicted.")
    request_id: Any = ignored("The server makes its own `id`.")
    priority: Any = ignored("Requests are served in order of arrival.")
    verbosity: Any = ignored("The model decides how much it writes.")


def describe_generation(schema: dict[str, Any]) -> None:
    """Order the properties, and allow one format of the output."""
    order_properties(schema)
    also(ONE_FORMAT)(schema)


class GenerationRequest(IgnoredFields):
    """The fields shared by chat completions and completions."""

    model_config = ConfigDict(json_schema_extra=describe_generation)
    refusals = UNSUPPORTED_FIELDS

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    stream: bool | None = described("true: send the output as server-sent events while it is generated.")
    stream_options: StreamOptions | None = described("What a stream contains besides the output.")
    n: int | None = sampling("n", 1, 128)
    temperature: float | None = sampling("temperature", 0)
    top_p: float | None = sampling("top_p", above=0, maximum=1)
    top_k: int | None = sampling("top_k", -1)
    min_p: float | None = sampling("min_p", 0, 1)
    presence_penalty: float | None = sampling("presence_penalty", -2, 2)
    frequency_penalty: float | None = sampling("frequency_penalty", -2, 2)
    repetition_penalty: float | None = sampling("repetition_penalty", above=0)
    max_tokens: int | None = ranged("Maximum output tokens; by default the rest of the context.", 1)
    min_tokens: int | None = sampling("min_tokens", 0)
    seed: int | None = sampling("seed", -(2**63), 2**63 - 1)
    stop: Stop | FailFastList[Stop] | None = described("Stop strings; the output ends before the first of them.")
    stop_token_ids: LimitedList[int] | None = described("Token ids that end the output.")
    ignore_eos: bool | None = described("true: continue after the model's end-of-sequence tokens.")
    skip_special_tokens: bool | None = described("false: leave special tokens such as <|im_end|> in the text.")
    bad_words: LimitedList[Word] | None = described("Words that are never generated, as they are usually tokenized.")
    logit_bias: LogitBias | None = described("By token id, a number from -100 to 100 added to its logit.")
    allowed_token_ids: NonEmptyList[int] | None = described("No other token is generated.")
    response_format: ResponseFormat | None = described("OpenAI's format of the output; a grammar enforces it.")
    structured_outputs: StructuredOutputs | None = described("vLLM's format of the output; a grammar enforces it.")
    guided_json: SchemaOrText | None = described("A JSON schema of the output, in vLLM's older name.")
    guided_regex: Grammar | None = described("A regular expression of the output, in vLLM's older name.")
    guided_choice: NonEmptyList[Choice] | None = described("The possible outputs, in vLLM's older name.")
    guided_grammar: Grammar | None = described("A Lark grammar of the output, in vLLM's older name.")
    prediction: Prediction | None = described("OpenAI's predicted output, used as draft; it never changes the output.")
    speculative: bool | Speculative | None = described(
        "Speculative decoding of this request: false for plain decoding, or settings."
    )
    speculative_n_max: int | None = Field(
        default=None,
        alias="speculative.n_max",
        description="llama.cpp's name of speculative.max_draft.",
        json_schema_extra={"minimum": 0, "maximum": 64},
    )
    speculative_n_min: int | None = Field(
        default=None,
        alias="speculative.n_min",
        description="Accepted without effect: the draft length is adaptive.",
        json_schema_extra={"minimum": 0, "maximum": 64},
    )
    speculative_p_min: float | None = Field(
        default=None,
        alias="speculative.p_min",
        description="Accepted without effect: the draft length is adaptive.",
        json_schema_extra={"minimum": 0, "maximum": 1},
    )
    cache_salt: str | None = described("Requests share the prefix cache only with those of the same salt.")
    return_token_origin: bool | None = described("Return the drafter of each token, or target.")
    return_token_details: bool | None = described(
        "Return each token's probability and the draft tokens rejected there; implies return_rounds."
    )
    return_rounds: bool | None = described("Return drafted and accepted tokens and times of each step.")
    return_tokens_as_token_ids: bool | None = described("Name tokens in logprobs `token:ID` instead of by their text.")
    timings_per_token: bool | None = described("Send llama.cpp's `timings` in every chunk of a stream.")
    return_progress: bool | None = described(
        "Return the prefilled and cached prompt tokens in the first chunk of a stream."
    )

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, data: Any) -> Any:
        """Drop fields that are null and unsupported fields with their neutral value."""
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in without_nulls(data).items() if not is_neutral(name, value)}
        if kept.get("best_of") == kept.get("n", 1):
            kept.pop("best_of", None)
        return kept

    @classmethod
    def may_ignore(cls, name: str, known: Iterable[str]) -> bool:
        """Refuse settings of `speculative` outside it as well."""
        return name not in Speculative.model_fields and super().may_ignore(name, known)

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


def _describe_completion(schema: dict[str, Any]) -> None:
    describe_generation(schema)
    some = {"properties": {"max_tokens": any_of(NULL, {"minimum": 1})}}
    also(unless(some, given(echo={"const": True})))(schema)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=_describe_completion)

    prompt: str | NonEmptyList[str] | NonEmptyList[int] | NonEmptyList[NonEmptyList[int]] = Field(
        description="One or more prompts, as text or as token ids.", examples=["The capital of France is"]
    )
    suffix: str | None = described(
        "The text after a gap that the output fills, and prompt the one before; the model needs tokens for it."
    )
    echo: bool | None = described("true: return the prompt before the output.")
    logprobs: int | None = ranged("Return logprobs of each token and of this many most likely ones.", 0, 20)
    max_tokens: int | None = ranged("Maximum output tokens, by default 16. 0 with echo scores the prompt.", 0)
