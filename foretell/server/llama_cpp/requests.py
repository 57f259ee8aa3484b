"""Request bodies of llama.cpp's /completion and /infill, and the completion request that each stands for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from foretell.errors import RequestError
from foretell.server.json_schemas import (
    FREE_TEXT,
    NULL,
    SchemaOrText,
    Stop,
    TemplateVariables,
    also,
    any_of,
    unless,
)
from foretell.server.openai.chat_requests import ChatMessageParam, Tool
from foretell.server.openai.requests import (
    CompletionRequest,
    FailFastList,
    ResponseFormat,
    Speculative,
    described,
    ignored,
    order_properties,
    ranged,
)
from foretell.server.request_model import StrictModel

SHARED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "ignore_eos",
    "response_format",
    "speculative",
    "cache_salt",
)  # fields with the same name and meaning in a completion request
NO_SAMPLER = "There is no such sampler."
# Fields without effect whose other values than 0 would have changed the output.
REPORTED = frozenset(
    ("repeat_last_n", "n_cmpl", "lora", "dynatemp_range", "typical_p", "tfs_z", "top_n_sigma", "mirostat")
    + ("xtc_probability", "dry_multiplier", "samplers")
)
RANDOM_SEEDS = (-1, 2**32 - 1)  # llama.cpp's seeds are unsigned


def _describe_request(schema: dict[str, Any]) -> None:
    order_properties(schema)
    model_probs = {"properties": {"post_sampling_probs": {"enum": [None, False]}}}
    one_format = any_of(*({"properties": each} for each in ({"json_schema": NULL}, {"response_format": FREE_TEXT})))
    also(unless(model_probs, {"properties": {"n_probs": {"enum": [None, 0]}}}), one_format)(schema)


class LlamaRequest(StrictModel):
    """The fields shared by /completion and /infill."""

    model_config = ConfigDict(json_schema_extra=_describe_request)
    refusals = {  # ignoring these would change the tokens that may come
        "grammar": "is not supported; send json_schema or response_format",
        "logit_bias": "is not supported here; use /v1/completions",
    }
    reported = REPORTED

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    stream: bool | None = described("true: send the output as server-sent events while it is generated.")
    n_predict: int | None = described("Maximum output tokens; the default and negative numbers: the context's rest.")
    t_max_predict_ms: int | None = described(
        "Milliseconds from the first token after which the output ends, once it has a line break; 0 or less: no limit."
    )
    response_fields: FailFastList[str] | None = described("Only these fields of the response; `a/b` is b in a.")
    temperature: float | None = ranged("Randomness; 0 is greedy.", 0)
    top_k: int | None = ranged("Sample from this many most likely tokens; 0 and -1 are all.", -1)
    top_p: float | None = ranged("Sample from the most likely tokens with this total probability.", above=0, maximum=1)
    min_p: float | None = ranged("Leave out tokens less likely than this share of the most likely one.", 0, 1)
    repeat_penalty: float | None = ranged("Divides the logits of tokens that occurred; 1 is none.", above=0)
    presence_penalty: float | None = ranged("Subtracted from the logits of tokens that occurred.", -2, 2)
    frequency_penalty: float | None = ranged("Subtracted for each time that a token occurred.", -2, 2)
    seed: int | None = ranged("Seed of the samples; -1 and 4294967295 are random ones.", -(2**63), 2**63 - 1)
    stop: FailFastList[Stop] | None = described("Stop strings; the output ends before the first of them.")
    ignore_eos: bool | None = described("true: continue after the model's end-of-sequence tokens.")
    n_probs: int | None = ranged("Return logprobs of each token and of this many most likely ones; 0: none.", 0, 20)
    post_sampling_probs: bool | None = described("Only false: logprobs are those of the model, before the samplers.")
    json_schema: SchemaOrText | None = described("A JSON schema of the output.")
    response_format: ResponseFormat | None = described("OpenAI's format of the output.")
    speculative: bool | Speculative | None = described("Speculative decoding of this request.")
    cache_salt: str | None = described("Requests share the prefix cache only with those of the same salt.")
    return_tokens: bool | None = described("true: return the token ids, too.")
    cache_prompt: Any = ignored("Prefixes are always cached.")
    id_slot: Any = ignored("There are no fixed slots.")
    samplers: Any = ignored("The order of the samplers is fixed.")
    n_indent: Any = ignored("Indentation is the model's.")
    n_keep: Any = ignored("Nothing is dropped from the context.")
    t_max_prompt_ms: Any = ignored("Prefill is not limited.")
    timings_per_token: Any = ignored("The last event has the timings.")
    return_progress: Any = ignored("The last event has the counts.")
    n_cache_reuse: Any = ignored("Prefixes are always cached.")
    n_discard: Any = ignored("Nothing is dropped from the context.")
    min_keep: Any = ignored("Samplers keep one token at least.")
    repeat_last_n: Any = ignored("Penalties look at the whole text.")
    penalize_nl: Any = ignored("Line breaks are penalized like other tokens.")
    n_cmpl: Any = ignored("There is one output; /v1/completions takes n.")
    lora: Any = ignored("Adapters are merged before the start.")
    dynatemp_range: Any = ignored(NO_SAMPLER)
    dynatemp_exponent: Any = ignored(NO_SAMPLER)
    typical_p: Any = ignored(NO_SAMPLER)
    tfs_z: Any = ignored(NO_SAMPLER)
    top_n_sigma: Any = ignored(NO_SAMPLER)
    xtc_probability: Any = ignored(NO_SAMPLER)
    xtc_threshold: Any = ignored(NO_SAMPLER)
    dry_multiplier: Any = ignored(NO_SAMPLER)
    dry_base: Any = ignored(NO_SAMPLER)
    dry_allowed_length: Any = ignored(NO_SAMPLER)
    dry_penalty_last_n: Any = ignored(NO_SAMPLER)
    dry_sequence_breakers: Any = ignored(NO_SAMPLER)
    mirostat: Any = ignored(NO_SAMPLER)
    mirostat_tau: Any = ignored(NO_SAMPLER)
    mirostat_eta: Any = ignored(NO_SAMPLER)

    def as_completion(self, prompt: Any, unstreamed_max_tokens: int, context: int) -> CompletionRequest:
        """Return the completion request with this prompt; `context` bounds an output without a limit."""
        self._check_values()
        limit = self.n_predict
        if limit is None or limit < 0:
            limit = context if self.stream else unstreamed_max_tokens
        fields = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty
        if self.json_schema is not None:
            fields["guided_json"] = self.json_schema
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        if self.seed is not None and self.seed not in RANDOM_SEEDS:
            fields["seed"] = self.seed
        # n_predict 0 evaluates the prompt alone; a stream of items is needed for t_max_predict_ms, too
        fields |= {"max_tokens": max(1, limit), "stream": bool(self.stream) or self.t_max_predict_ms is not None}
        return CompletionRequest.model_construct(prompt=prompt, **fields)

    def _check_values(self) -> None:
        """Refuse a number outside its declared range, under llama.cpp's name of the field."""
        for name, field in type(self).model_fields.items():
            limits: Any = field.json_schema_extra
            value = getattr(self, name)
            if not isinstance(limits, dict) or not isinstance(value, int | float):
                continue
            low, above, high = (limits.get(limit) for limit in ("minimum", "exclusiveMinimum", "maximum"))
            wanted = {
                f"{low} or more": low is None or value >= low,
                f"above {above}": above is None or value > above,
                f"at most {high}": high is None or value <= high,
            }
            missed = [text for text, holds in wanted.items() if not holds]
            if missed:
                raise RequestError(name, f"must be {missed[0]}, not {value}")
        if self.post_sampling_probs and self.n_probs:
            raise RequestError("post_sampling_probs", "is not supported; leave it out for logprobs before the samplers")


def _one_prompt(schema: dict[str, Any]) -> None:
    """State that several strings without token ids between them would be several prompts."""
    number = {"contains": {"type": "integer"}}
    schema["anyOf"] = [number, {"minItems": 1, "maxItems": 1, "items": {"minLength": 1}}]


class LlamaCompletionRequest(LlamaRequest):
    """POST /completion: llama.cpp's own completions."""

    prompt: str | Annotated[FailFastList[int | str], Field(json_schema_extra=_one_prompt)] = Field(
        description="The prompt: text, or a list of token ids and strings.", examples=["The capital of France is"]
    )


class InfillFile(StrictModel):
    """Another file of the project."""

    path = "input_extra."

    filename: str = Field(default="tmp", description="Its name.")
    text: str = Field(description="Its text, or a part of it.")


class InfillRequest(LlamaRequest):
    """POST /infill: the text of a gap, by the model's fill-in-the-middle tokens."""

    input_prefix: str = Field(description="The text before the gap.", examples=["def add(a, b):\n    return "])
    input_suffix: str = Field(description="The text after the gap.", examples=["\n"])
    input_extra: FailFastList[InfillFile] | None = described("Other files; the first are left out if they do not fit.")
    prompt: str | None = described("More text directly before the gap.")


class ApplyTemplateRequest(StrictModel):
    """POST /apply-template: the prompt of a chat."""

    model: str | None = described("A name that `/v1/models` lists; without it, the served model.")
    messages: FailFastList[ChatMessageParam] = Field(
        min_length=1, description="The conversation.", examples=[[{"role": "user", "content": "Why is the sky blue?"}]]
    )
    tools: FailFastList[Tool] | None = described("Functions that the model may call.")
    add_generation_prompt: bool = Field(default=True, description="End with the start of a response.")
    chat_template_kwargs: TemplateVariables | None = described("Variables of the chat template.")
