"""Sampling parameters of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .options import nearest, option, strict
from .structured_output import GrammarSpec

LogitsProcessor = Callable[[list[int], Any], Any]  # (output tokens so far, logits [vocab]) -> logits

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 100
MAX_CHOICES = 128
MAX_TOP_K = 2**31 - 1  # tokens; larger values mean the same, and would overflow the integers of the samplers
# Fields that decide the output and have the same name and meaning in OpenAI's and vLLM's bodies; not the length.
DECIDING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
)
# Fields that a server or a model's generation config may set for requests that leave them out.
DEFAULTABLE = DECIDING[: DECIDING.index("min_tokens")]


@strict
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters in vLLM's names. The defaults are greedy; `LLM.default_params` returns the model's own."""

    temperature: float = option(
        0.0,
        "sampling temperature; 0 is greedy, 1 samples from the model's own distribution",
        aliases=("--temp",),
        common=True,
    )
    top_p: float = option(1.0, "sample from the most likely tokens that together reach this probability", common=True)
    top_k: int = option(0, "sample from this many of the most likely tokens; 0 means all", common=True)
    min_p: float = option(0.0, "drop tokens below this fraction of the most likely token's probability")
    presence_penalty: float = option(0.0, "penalty for tokens that occur in the output, once each (-2 to 2)")
    frequency_penalty: float = option(0.0, "penalty for tokens by how often they occur in the output (-2 to 2)")
    repetition_penalty: float = option(
        1.0, "divide the logits of tokens in prompt or output by this; 1 is off", aliases=("--repeat-penalty",)
    )
    max_tokens: int | None = option(
        None,
        f"maximum output tokens (default: {DEFAULT_MAX_TOKENS}, or fewer where the context ends)",
        aliases=("--predict", "--n-predict"),
        common=True,
    )
    skip_special_tokens: bool = option(True, "leave special tokens such as <|im_end|> out of the text")
    min_tokens: int = option(0, "minimum output tokens before the sequence may end")
    seed: int | None = option(
        None,
        "random seed; the same seed gives the same output under the rule match (the default) or without drafts; "
        "random and reported if left out",
        common=True,
    )
    stop: tuple[str, ...] = option(
        (), "stop string, not included in the output; may be given several times", common=True
    )
    stop_token_ids: tuple[int, ...] = option((), "stop token id; may be given several times")
    ignore_eos: bool = option(False, "continue after the model's end-of-sequence tokens")
    bad_words: tuple[str, ...] = option(
        (), "never generate this word, as it is usually tokenized; may be given several times"
    )
    logprobs: int | None = option(None, "return logprobs of each output token and of this many most likely ones")
    prompt_logprobs: int | None = option(None, "return logprobs of each prompt token and of this many most likely ones")
    thinking_budget: int | None = option(None, "end the reasoning (</think>) after this many tokens")
    n: int = option(1, "number of outputs for each prompt")
    logit_bias: Mapping[int, float] | None = None  # by token id, added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is generated
    logits_processors: tuple[LogitsProcessor, ...] = ()  # functions of (output tokens, logits)
    structured_outputs: GrammarSpec | None = None  # grammar of the output

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            put(self, name, (strings,) if isinstance(strings, str) else tuple(strings or ()))
        for name in ("stop_token_ids", "logits_processors"):
            put(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            put(self, "logit_bias", _int_keys(self.logit_bias))
        if self.top_k == -1:  # vLLM's value for "all"
            put(self, "top_k", 0)
        if _is_int(self.top_k) and self.top_k > MAX_TOP_K:
            put(self, "top_k", MAX_TOP_K)
        for check in (self._check_distribution, self._check_penalties, self._check_limits, self._check_lists):
            check()

    def _check_distribution(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise RequestError("temperature", f"must be 0 or a positive number, not {self.temperature}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError("min_p", f"must be between 0 and 1, not {self.min_p}")
        if not (_is_int(self.top_k) and self.top_k >= 0):
            raise RequestError("top_k", f"must be 0 (all) or a positive integer, not {self.top_k}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not (_is_number(getattr(self, name)) and -2 <= getattr(self, name) <= 2):
                raise RequestError(name, f"must be between -2 and 2, not {getattr(self, name)}")
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise RequestError("repetition_penalty", f"must be above 0, not {self.repetition_penalty}")

    def _check_limits(self) -> None:
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise RequestError("max_tokens", f"must be 1 or more, not {self.max_tokens}")
        if not (_is_int(self.min_tokens) and self.min_tokens >= 0):
            raise RequestError("min_tokens", f"must be 0 or more, not {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if not (_is_int(self.n) and 1 <= self.n <= MAX_CHOICES):
            raise RequestError("n", f"must be between 1 and {MAX_CHOICES}, not {self.n}")
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise RequestError("seed", f"must be a 64-bit integer, not {self.seed}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and 0 <= value <= MAX_LOGPROBS):
                raise RequestError(name, f"must be between 0 and {MAX_LOGPROBS}, not {value}")
        if self.thinking_budget is not None and not (_is_int(self.thinking_budget) and self.thinking_budget >= 0):
            raise RequestError("thinking_budget", f"must be 0 or more, not {self.thinking_budget}")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise RequestError(name, "must be strings of at least one character")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all(_is_int(token) and token >= 0 for token in getattr(self, name) or ()):
                raise RequestError(name, "must be token ids, 0 or more")
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids", "is empty; name at least one token, or leave it out")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not (_is_number(bias) and -100 <= bias <= 100):
                raise RequestError(
                    "logit_bias", f"must give token ids a number between -100 and 100, not {token}: {bias}"
                )
        if not all(callable(each) for each in self.logits_processors):
            raise RequestError("logits_processors", "must be functions of (tokens, logits)")


def generation_overrides(text: str | None) -> dict[str, Any]:
    """Parse default sampling parameters, given as JSON, and check them."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise RequestError("override_generation_config", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("override_generation_config", """must be an object such as {"temperature": 0.6}""")
    for name in found:
        if name not in DEFAULTABLE:
            raise RequestError("override_generation_config", f"has no {name!r}; {nearest(name, DEFAULTABLE)}")
    SamplingParams(**found)
    return found


def _int_keys(bias: Mapping[Any, float]) -> dict[int, float]:
    """Convert the keys to token ids; in JSON they are strings."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (ValueError, TypeError, AttributeError):
        raise RequestError("logit_bias", "must map token ids to numbers") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
