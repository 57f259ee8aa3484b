"""Translation of vLLM's `speculative_config` into a `SpeculationConfig`."""

from __future__ import annotations

import json
from typing import Any

from .config import SpeculationConfig
from .errors import RequestError
from .options import nearest

# Keys of vLLM's that have no field of the same name and meaning in `SpeculationConfig`.
VLLM_KEYS = (
    "method",
    "model",
    "draft_tensor_parallel_size",
    "rejection_sample_method",
    "draft_sample_method",
    "disable_by_batch_size",
    "revision",
)
# Keys of vLLM's that have no effect here: there is nothing to switch, or it is always so.
NO_EFFECT = (
    "attention_backend",
    "disable_eagle_block_drop",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "parallel_drafting",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)
SYNTHETIC = "is for measurements with synthetic drafts; use foretell.draft.scripted.OracleDrafter for those"
SUFFIX = "is not supported here: the drafter suffix limits its own memory and drafts; limit drafts with max_draft"
# Keys of vLLM's without an equivalent, and why.
UNSUPPORTED = {
    "code_revision": "is not supported here: no code of a model's repository runs",
    "dspark_draft_topk": "is not supported here: a draft head is what its checkpoint says",
    "enable_adaptive_verification": "is not needed here: draft lengths adapt without num_speculative_tokens",
    "kv_cache_dtype": "is not supported here: a draft model has the data type of --kv-cache-dtype",
    "max_model_len": "is not supported here: a draft model has the context of the target",
    "moe_backend": "is not supported here: mixtures of experts are not served",
    "quantization": "is not supported here: a draft model runs as --quantization says for the target",
    "suffix_decoding_max_cached_requests": SUFFIX,
    "suffix_decoding_max_spec_factor": SUFFIX,
    "suffix_decoding_max_tree_depth": SUFFIX,
    "suffix_decoding_min_token_prob": SUFFIX,
    "synthetic_acceptance_length": SYNTHETIC,
    "synthetic_acceptance_rate": SYNTHETIC,
    "synthetic_acceptance_rates": SYNTHETIC,
}
# vLLM's rejection sampling methods and the verification rules that implement them.
RULES = {"strict": "match", "probabilistic": "rejection", "standard": "rejection"}

# Names of speculative methods in vLLM and SGLang, and the drafters that implement them.
METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "none": "none",
    "draft_model": "model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
    "mtp": "mtp",
    "dflash": "block",
    "dspark": "block",
    "suffix": "suffix",
}


def speculation_from_vllm(config: dict[str, Any] | str, **overrides: Any) -> SpeculationConfig:
    """Build a `SpeculationConfig` from vLLM's `speculative_config`, given as a dict or as JSON."""
    given = _parse(config)
    method, model = given.pop("method", None), given.pop("model", None)
    settings = dict(overrides)
    if method is not None or model is not None:
        drafter = _drafter_name(method, model)
        if settings.get("drafter", drafter) != drafter:
            raise RequestError(
                "drafter", f"is {settings['drafter']!r}, but speculative_config says {drafter!r}; give one"
            )
        settings["drafter"] = drafter
    given |= _translate(given, settings.get("drafter", "auto"))
    known = [name for name in SpeculationConfig.__dataclass_fields__ if name != "drafter"]
    for name, value in given.items():
        if name not in known:
            raise RequestError(f"speculative_config.{name}", f"is not known; {nearest(name, [*known, *VLLM_KEYS])}")
        is_table = isinstance(value, list) and name != "draft_corpus"
        settings.setdefault(name, json.dumps(value) if is_table else value)
    return SpeculationConfig(**settings)


def _translate(given: dict[str, Any], drafter: str) -> dict[str, Any]:
    """Remove vLLM's own keys from `given` and return their translation; raise for what is not supported."""
    for name, reason in UNSUPPORTED.items():
        if given.pop(name, None) is not None:
            raise _error(name, reason)
    for name in NO_EFFECT:
        given.pop(name, None)
    theirs = {name: value for name in VLLM_KEYS if (value := given.pop(name, None)) is not None}
    translated: dict[str, Any] = {}
    if "revision" in theirs:
        translated["draft_revision"] = theirs["revision"]
    if "draft_tensor_parallel_size" in theirs:
        translated["draft_tensor_parallel_size"] = theirs["draft_tensor_parallel_size"]
    if "rejection_sample_method" in theirs:
        translated["rule"] = _rule(theirs["rejection_sample_method"], given.get("rule"))
    if "disable_by_batch_size" in theirs:
        lengths = _batch_size_limit(theirs["disable_by_batch_size"], given.pop("num_speculative_tokens", None))
        translated["num_speculative_tokens_per_batch_size"] = lengths
    sampling = theirs.get("draft_sample_method", "probabilistic")
    drafter_samples = drafter.partition(":")[0] in (
        "model",
        "eagle",
        "block",
        "medusa",
        "mtp",
        "assistant",
        "distilled",
    )
    if sampling not in ("greedy", "probabilistic") or (sampling == "greedy" and drafter_samples):
        raise _error("draft_sample_method", "must be probabilistic: a draft model samples with the request's settings")
    return translated


def _rule(method: Any, given: Any) -> str:
    if method == "synthetic":
        raise _error("rejection_sample_method", SYNTHETIC)
    if method not in RULES:
        raise _error("rejection_sample_method", f"must be strict or probabilistic, not {method!r}")
    rule = RULES[method]
    if given not in (None, rule):
        raise _error("rejection_sample_method", f"{method} is the rule {rule} here, and rule is {given!r}; give one")
    return rule


def _batch_size_limit(batch_size: Any, num_tokens: Any) -> str:
    """Translate vLLM's older `disable_by_batch_size` into rows of draft lengths by batch size."""
    if type(batch_size) is not int or batch_size < 1:
        raise _error("disable_by_batch_size", f"must be a number of sequences, 1 or more, not {batch_size!r}")
    if type(num_tokens) is not int:
        raise _error(
            "disable_by_batch_size", "needs num_speculative_tokens; without it, draft lengths adapt to the batch size"
        )
    return json.dumps([[1, batch_size, num_tokens]])


def _error(key: str, message: str) -> RequestError:
    return RequestError(f"speculative_config.{key}", message)


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
    if model is not None and not isinstance(model, str):
        raise RequestError("speculative_config.model", f"must be a string, not {model!r}")
    if method is None:
        return "ngram" if model in ("ngram", "[ngram]") else f"model:{model}"
    if not isinstance(method, str) or method not in METHODS:
        raise RequestError("speculative_config.method", f"{method!r} is not known; {nearest(str(method), METHODS)}")
    name = METHODS[method]
    return f"{name}:{model}" if model and name not in ("ngram", "suffix") else name
