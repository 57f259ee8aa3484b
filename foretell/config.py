"""What an engine is made of: frozen, checked, declared once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .options import nearest, option, strict

DEFAULT_DRAFT = 8


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The model and the room it gets."""

    model: str = option(
        "smollm2-135m", "a folder, a .gguf file, a Hugging Face id or a built-in name", aliases=("--model-path", "-m")
    )
    dtype: str = option("auto", "float type of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("auto", "where to run: auto, cpu or cuda")
    max_model_len: int | None = option(None, "the longest text in tokens, prompt included (default: the model's own)")
    max_num_seqs: int = option(64, "the most texts written at once")
    max_num_batched_tokens: int = option(2048, "the most tokens run in one step; longer prompts take several")
    page_size: int = option(16, "tokens a page of the cache holds", aliases=("--block-size",))
    kv_memory: float | None = option(None, "GiB for the cache of keys and values (default: by model and memory)")
    prefix_cache: bool = option(True, "share the cache of equal beginnings", aliases=("--enable-prefix-caching",))
    threads: int | None = option(None, "CPU threads (default: physical cores)")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
        for name in ("max_model_len", "kv_memory", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RequestError(name, f"must be above 0, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                "max_num_batched_tokens", f"must be at least max_num_seqs ({self.max_num_seqs}): a token a text"
            )


@strict
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How to guess ahead."""

    drafter: str = option("auto", "how to guess ahead: none, ngram, auto")
    max_draft: int = option(DEFAULT_DRAFT, "the most tokens guessed for a text in one step")
    num_speculative_tokens: int | None = option(None, "guess just this many each step and do not adapt")
    rule: str = option(
        "match", "which guesses stand: match, rejection, block or auto; lossy: confidence, typical, ensemble"
    )
    prompt_lookup_min: int = option(2, "n-gram: the shortest run of tokens that counts as a match")
    prompt_lookup_max: int = option(4, "n-gram: the longest run of tokens that is looked up")

    def __post_init__(self) -> None:
        for name in ("max_draft", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 64:
                raise RequestError(name, f"must be between 0 and 64, not {value}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise RequestError(
                "prompt_lookup_min", f"must be between 1 and prompt_lookup_max ({self.prompt_lookup_max})"
            )

    @property
    def budget(self) -> int:
        """The most nodes a step may draft for a sequence."""
        return self.max_draft if self.num_speculative_tokens is None else self.num_speculative_tokens

    @classmethod
    def from_vllm(cls, config: dict[str, Any] | str, **overrides: Any) -> SpeculationConfig:
        """Read vLLM's `speculative_config`: a dict or its JSON."""
        given = _parse(config)
        method, model = given.pop("method", None), given.pop("model", None)
        settings = dict(overrides)
        if method is not None or model is not None:
            settings.setdefault("drafter", _drafter_name(method, model))
        known = [name for name in cls.__dataclass_fields__ if name != "drafter"]
        for name, value in given.items():
            if name not in known:
                raise RequestError(f"speculative_config.{name}", f"is not known; {nearest(name, [*known, *VLLM_KEYS])}")
            settings.setdefault(name, value)
        return cls(**settings)


VLLM_KEYS = ("method", "model")

# vLLM's and SGLang's words for a method, and ours.
METHODS = {
    "ngram": "ngram",
    "none": "none",
    "draft_model": "model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
    "mtp": "mtp",
    "dflash": "block",
    "suffix": "suffix",
}


def _parse(config: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise RequestError("speculative_config", f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RequestError("speculative_config", 'must be an object such as {"method": "ngram"}')
    return dict(config)


def _drafter_name(method: str | None, model: str | None) -> str:
    if method is None:
        return "ngram" if model in ("ngram", "[ngram]") else f"model:{model}"
    if method not in METHODS:
        raise RequestError("speculative_config.method", f"{method!r} is not known; {nearest(method, METHODS)}")
    name = METHODS[method]
    return f"{name}:{model}" if model and name not in ("ngram", "suffix") else name
