"""How a request wants its tokens drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .options import option, strict
from .structured_output import GrammarSpec

LogitsProcessor = Callable[[list[int], Any], Any]  # (tokens written so far, scores [vocab]) -> scores, as tensors

DEFAULT_MAX_TOKENS = 256
MOST_LOGPROBS = 100
MOST_CHOICES = 128
# The fields that decide a text and have the same name and meaning in OpenAI's bodies and vLLM's; its length is beside.
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


@strict
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The defaults are greedy; `LLM.default_params` gives the model's own."""

    temperature: float = option(0.0, "0 takes the likeliest token; 1 samples from the model's own distribution")
    top_p: float = option(1.0, "keep the likeliest tokens that together reach this probability")
    top_k: int = option(0, "keep this many of the likeliest tokens; 0 keeps all")
    min_p: float = option(0.0, "drop tokens below this share of the likeliest one's probability")
    presence_penalty: float = option(0.0, "lower tokens that were written already, once each (-2 to 2)")
    frequency_penalty: float = option(0.0, "lower tokens by how often they were written (-2 to 2)")
    repetition_penalty: float = option(1.0, "divide the scores of tokens in prompt or text by this; 1 does nothing")
    max_tokens: int | None = option(
        None, f"the most tokens to write (default: {DEFAULT_MAX_TOKENS}, or fewer where the context ends)"
    )
    skip_special_tokens: bool = option(True, "leave marks such as <|im_end|> out of the text")
    min_tokens: int = option(0, "do not end before this many tokens are written")
    seed: int | None = option(
        None,
        "the same seed gives the same text, under the rule match (the default) or without guesses; drawn and reported "
        "where left out",
    )
    stop: tuple[str, ...] = option((), "end the text before this string; may be given several times")
    stop_token_ids: tuple[int, ...] = option((), "end the text at this token; may be given several times")
    ignore_eos: bool = option(False, "go on after the model's end tokens")
    bad_words: tuple[str, ...] = option(
        (), "never write this, as it is usually split into tokens; may be given several times"
    )
    logprobs: int | None = option(None, "give log-probabilities of each token and of this many of the likeliest")
    prompt_logprobs: int | None = option(None, "the same for the tokens of the prompt")
    thinking_budget: int | None = option(None, "close a <think> passage after this many tokens")
    n: int = option(1, "how many texts to write for each prompt")
    logit_bias: Mapping[int, float] | None = None  # token -> what is added to its score
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is written
    logits_processors: tuple[LogitsProcessor, ...] = ()  # (tokens written so far, scores) -> scores
    structured_outputs: GrammarSpec | None = None  # a grammar the text must follow

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            put(self, name, (texts,) if isinstance(texts, str) else tuple(texts or ()))
        for name in ("stop_token_ids", "logits_processors"):
            put(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            put(self, "logit_bias", _whole_keys(self.logit_bias))
        if self.top_k == -1:  # vLLM's word for "all"
            put(self, "top_k", 0)
        for check in (self._check_distribution, self._check_penalties, self._check_limits, self._check_lists):
            check()

    def _check_distribution(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise RequestError("temperature", f"must be 0 or a positive number, not {self.temperature}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError("min_p", f"must be between 0 and 1, not {self.min_p}")
        if not (_is_whole(self.top_k) and self.top_k >= 0):
            raise RequestError("top_k", f"must be 0 (all) or a positive whole number, not {self.top_k}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not (_is_number(getattr(self, name)) and -2 <= getattr(self, name) <= 2):
                raise RequestError(name, f"must be between -2 and 2, not {getattr(self, name)}")
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise RequestError("repetition_penalty", f"must be above 0, not {self.repetition_penalty}")

    def _check_limits(self) -> None:
        if self.max_tokens is not None and not (_is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise RequestError("max_tokens", f"must be 1 or more, not {self.max_tokens}")
        if not (_is_whole(self.min_tokens) and self.min_tokens >= 0):
            raise RequestError("min_tokens", f"must be 0 or more, not {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if not (_is_whole(self.n) and 1 <= self.n <= MOST_CHOICES):
            raise RequestError("n", f"must be between 1 and {MOST_CHOICES}, not {self.n}")
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**63):
            raise RequestError("seed", f"must be a whole number of at most 64 bits, not {self.seed}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and 0 <= value <= MOST_LOGPROBS):
                raise RequestError(name, f"must be between 0 and {MOST_LOGPROBS}, not {value}")
        if self.thinking_budget is not None and not (_is_whole(self.thinking_budget) and self.thinking_budget >= 0):
            raise RequestError("thinking_budget", f"must be 0 or more, not {self.thinking_budget}")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise RequestError(name, "must be strings of at least one character")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all(_is_whole(token) and token >= 0 for token in getattr(self, name) or ()):
                raise RequestError(name, "must be token ids, 0 or more")
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids", "is empty; name at least one token, or leave it out")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not (_is_number(bias) and -100 <= bias <= 100):
                raise RequestError(
                    "logit_bias", f"must give token ids a number between -100 and 100, not {token}: {bias}"
                )
        if not all(callable(each) for each in self.logits_processors):
            raise RequestError("logits_processors", "must be functions of (tokens, scores)")


def _whole_keys(bias: Mapping[Any, float]) -> dict[int, float]:
    """JSON has only strings for keys."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (ValueError, TypeError, AttributeError):
        raise RequestError("logit_bias", "must map token ids to numbers") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
