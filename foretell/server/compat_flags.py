"""Flags of vLLM, SGLang, llama.cpp and MLX that are translated to our options."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest, option, strict
from foretell.vllm_config import METHODS, speculation_from_vllm

# SGLang's and llama.cpp's names of a method -> vLLM's.
ALGORITHMS = {
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "MEDUSA": "medusa",
    "NONE": "none",
    "DRAFT-SIMPLE": "draft_model",
    "DRAFT-EAGLE3": "eagle3",
    "DRAFT-MTP": "mtp",
    "DRAFT-DFLASH": "dflash",
    "DRAFT-DSPARK": "dspark",
    "NGRAM-SIMPLE": "ngram",
    "NGRAM-MAP-K": "ngram",
    "NGRAM-MAP-K4V": "ngram",
    "NGRAM-CACHE": "ngram",
    "NGRAM-MOD": "ngram",
}
AUTOMATIC = -1  # llama.cpp's number of parallel sequences that it chooses itself


@strict
@dataclass(frozen=True, kw_only=True)
class CompatFlags:
    """Options of other engines with an equivalent here."""

    speculative_model: str | None = option(
        None,
        "draft model; same as --drafter model:NAME",
        aliases=(
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            "--draft-model",
            "--model-draft",
            "-md",
            "--spec-model",
            "--spec-draft-model",
        ),
    )
    spec_draft_hf: str | None = option(
        None,
        "llama.cpp: draft model from a Hugging Face repository of GGUF files, OWNER/REPO[:QUANT] (default: Q4_K_M)",
        aliases=("-hfd", "-hfrd", "--hf-repo-draft"),
        metavar="REPO",
    )
    speculative_algorithm: str | None = option(
        None,
        "SGLang's and llama.cpp's drafter names, such as NGRAM or STANDALONE; comma-separated",
        aliases=("--spec-type", "--spec-method"),
    )
    speculative_num_steps: int | None = option(None, "SGLang: depth of a draft in tokens")
    speculative_num_draft_tokens: int | None = option(None, "SGLang: tokens of a draft, including its root")
    speculative_eagle_topk: int | None = option(
        None, "SGLang: branches per node of the draft tree; 1 is a chain, above that the controller chooses the width"
    )
    speculative_use_rejection_sampling: bool = option(False, "SGLang: same as --rule rejection")
    speculative_use_block_verification: bool = option(False, "SGLang: same as --rule block")
    num_draft_tokens: int | None = option(None, "MLX: same as --num-speculative-tokens", aliases=("--spec-tokens",))
    draft_max: int | None = option(
        None,
        "llama.cpp: same as --max-draft",
        aliases=(
            "--draft",
            "--draft-n",
            "--spec-draft-n-max",
            "--spec-ngram-size-m",
            "--spec-ngram-simple-size-m",
            "--spec-ngram-map-k-size-m",
            "--spec-ngram-map-k4v-size-m",
            "--spec-ngram-mod-n-max",
        ),
    )
    spec_ngram_size_n: int | None = option(
        None,
        "llama.cpp: length of the n-gram to match",
        aliases=(
            "--spec-ngram-simple-size-n",
            "--spec-ngram-map-k-size-n",
            "--spec-ngram-map-k4v-size-n",
            "--spec-ngram-mod-n-match",
        ),
    )
    context_length: int | None = option(
        None, "SGLang, llama.cpp: same as --max-model-len", aliases=("--ctx-size", "-c")
    )
    max_running_requests: int | None = option(
        None, "SGLang, llama.cpp: same as --max-num-seqs", aliases=("--parallel", "-np")
    )

    mem_fraction_static: float | None = option(None, "SGLang: same as --gpu-memory-utilization")
    batch_size: int | None = option(None, "llama.cpp: same as --max-num-batched-tokens", aliases=("-b",))
    disable_radix_cache: bool = option(
        False, "SGLang, llama.cpp: same as --no-prefix-cache", aliases=("--no-cache-prompt",)
    )
    hf_repo: str | None = option(
        None,
        "llama.cpp: model from a Hugging Face repository of GGUF files, OWNER/REPO[:QUANT] (default: Q4_K_M)",
        aliases=("-hf", "-hfr"),
    )
    hf_file: str | None = option(None, "llama.cpp: GGUF file of --hf-repo", aliases=("-hff",))
    chat_template_file: str | None = option(None, "llama.cpp: same as --chat-template", metavar="FILE")
    tokenizer: str | None = option(
        None, "vLLM, SGLang: accepted if it names the model, whose own tokenizer is used", aliases=("--tokenizer-path",)
    )
    download_dir: str | None = option(None, "vLLM, SGLang: cache folder of Hugging Face's models; same as HF_HUB_CACHE")
    data_parallel_size: int | None = option(
        None, "vLLM, SGLang: same as --replicas; 1 is a server without Ray", aliases=("--dp-size", "--dp", "-dp")
    )
    allowed_origins: str | None = option(None, "vLLM, MLX: same as --cors-origin; a JSON list, or comma-separated")
    temp: float | None = option(
        None, "llama.cpp, MLX: temperature of requests that do not set it", aliases=("--temperature",)
    )
    top_k: int | None = option(None, "llama.cpp, MLX: the same for top_k")
    top_p: float | None = option(None, "llama.cpp, MLX: the same for top_p")
    min_p: float | None = option(None, "llama.cpp, MLX: the same for min_p")
    repeat_penalty: float | None = option(None, "llama.cpp: the same for repetition_penalty")
    presence_penalty: float | None = option(None, "llama.cpp: the same for presence_penalty")
    frequency_penalty: float | None = option(None, "llama.cpp: the same for frequency_penalty")

    def engine_options(self) -> dict[str, Any]:
        """Return the equivalent engine options."""
        given = {
            "model": self._model(),
            "chat_template": self.chat_template_file,
            "max_model_len": self.context_length or None,  # llama.cpp's 0 is the model's own
            "max_num_seqs": None if self.max_running_requests == AUTOMATIC else self.max_running_requests,
            "max_num_batched_tokens": self.batch_size,
            "gpu_memory_utilization": self.mem_fraction_static,
            "prefix_cache": False if self.disable_radix_cache else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def server_options(self) -> dict[str, Any]:
        """Return the equivalent options of the HTTP server."""
        return {} if self.allowed_origins is None else {"cors_origin": _word_list(self.allowed_origins)}

    def cluster_options(self) -> dict[str, Any]:
        """Return the equivalent options of a deployment with replicas."""
        return {} if self.data_parallel_size in (None, 1) else {"replicas": self.data_parallel_size}

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters of requests that do not set them."""
        given = {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check_tokenizer(self, model: str) -> None:
        """Raise RequestError for a tokenizer other than the model's."""
        if self.tokenizer not in (None, model):
            raise RequestError("tokenizer", "is not supported here: the tokenizer is the model's own; leave it out")

    def _model(self) -> str | None:
        if self.hf_repo is None:
            if self.hf_file is not None:
                raise RequestError("hf_file", "needs --hf-repo, which names its repository")
            return None
        if self.hf_file is not None:
            return f"{self.hf_repo.partition(':')[0]}/{self.hf_file}"
        return _gguf_repo(self.hf_repo)

    def speculation_options(self) -> dict[str, Any]:
        """Return the equivalent speculation options."""
        chain, max_draft, tree = self._draft_sizes()
        given = {
            "drafter": self._drafter(),
            "num_speculative_tokens": _given_once("num_draft_tokens", self.num_draft_tokens, chain),
            "max_draft": _given_once("draft_max", self.draft_max, max_draft),
            "tree_nodes": tree,
            "rule": self._rule(),
            "prompt_lookup_min": self.spec_ngram_size_n,
            "prompt_lookup_max": self.spec_ngram_size_n,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def ignored(self) -> list[str]:
        """Return the flags that are not applied as given, each with what happens instead."""
        if (self.speculative_eagle_topk or 1) == 1:
            return []
        return [f"--speculative-eagle-topk {self.speculative_eagle_topk} (the controller chooses the tree width)"]

    def _rule(self) -> str | None:
        if (
            self.speculative_use_block_verification
        ):  # a form of rejection sampling, which SGLang's flags may both ask for
            return "block"
        return "rejection" if self.speculative_use_rejection_sampling else None

    def _drafter(self) -> str | None:
        hf_repo = None if self.spec_draft_hf is None else _gguf_repo(self.spec_draft_hf)
        model = _given_once("speculative_model", self.speculative_model, hf_repo)
        if self.speculative_algorithm is None:
            return None if model is None else _drafter_name(None, model)
        methods = [_method(name.strip()) for name in self.speculative_algorithm.split(",")]
        if "none" in methods and len(methods) > 1:
            raise RequestError("speculative_algorithm", "combines none with others; leave one of them out")
        for method in methods:
            if METHODS[method] == "model" and model is None:
                reason = f"{self.speculative_algorithm} needs --speculative-draft-model"
                raise RequestError("speculative_algorithm", reason)
        return ",".join(dict.fromkeys(_drafter_name(method, model) for method in methods))

    def _draft_sizes(self) -> tuple[int | None, int | None, int | None]:
        """Return the chain length or tree depth, the most draft tokens, and the nodes of the tree.

        SGLang counts the root of the draft as a node; we do not. The second is set if only one size of a tree is given.
        """
        nodes = None if self.speculative_num_draft_tokens is None else self.speculative_num_draft_tokens - 1
        sizes = [size for size in (self.speculative_num_steps, nodes) if size is not None]
        if (self.speculative_eagle_topk or 1) < 1:
            raise RequestError("speculative_eagle_topk", f"must be 1 or more, not {self.speculative_eagle_topk}")
        if self.speculative_eagle_topk in (None, 1):
            return min(sizes, default=None), None, None
        if len(sizes) == 2:
            return self.speculative_num_steps, None, nodes
        return None, max(sizes, default=None), None


def _gguf_repo(name: str) -> str:
    """Return a repository of GGUF files in a form that selects llama.cpp's default file if it names none."""
    return name if ":" in name else f"{name}:latest"


def _word_list(text: str) -> tuple[str, ...]:
    """Parse a JSON list of strings, or comma-separated words."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [word.strip() for word in text.split(",")]
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise RequestError("allowed_origins", f"""must be a list such as '["https://a.example"]', not {text}""")
    return tuple(found)


def _method(algorithm: str) -> str:
    name = algorithm.upper().replace("_", "-")
    if algorithm.lower() in METHODS:  # vLLM's own
        return algorithm.lower()
    if name not in ALGORITHMS:
        raise RequestError("speculative_algorithm", f"{algorithm!r} is not known; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def _drafter_name(method: str | None, model: str | None) -> str:
    """Return the drafter for vLLM's method and model; the model alone selects a draft model."""
    given = {"method": method, "model": model}
    return speculation_from_vllm({name: value for name, value in given.items() if value}).drafter


def merge_options(own: dict[str, Any], translated: dict[str, Any]) -> dict[str, Any]:
    """Merge our options with translated ones; raise RequestError if two values of an option differ."""
    return {name: _given_once(name, own.get(name), translated.get(name)) for name in dict.fromkeys((*own, *translated))}


def _given_once(name: str, *values: Any) -> Any:
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(name, f"is given twice, as {given[0]!r} and {given[1]!r}; give it once")
    return given[0] if given else None


def check_speculation(config: SpeculationConfig) -> None:
    """Raise RequestError for options without effect with the chosen drafter, which would mislead."""
    changed = [f.name for f in fields(config) if f.name != "drafter" and getattr(config, f.name) != f.default]
    if config.drafter == "none" and changed:
        raise RequestError(changed[0], "has no effect with --drafter none; leave one of them out")
    named = {name.strip().partition(":")[0] for name in config.drafter.split(",")}
    for name in changed:
        users = OPTION_USERS.get(name)
        if users is not None and named <= ALL_DRAFTERS - users:
            raise RequestError(name, f"has no effect with --drafter {config.drafter}; leave one of them out")
    if config.min_draft > config.budget:
        raise RequestError(
            "min_draft", f"{config.min_draft} is more than the {config.budget} draft tokens allowed per step"
        )


NGRAM_DRAFTERS = frozenset(("auto", "ngram"))
MODEL_DRAFTERS = frozenset(("model", "self", "exit", "eagle", "block", "medusa", "mtp", "assistant", "distilled"))
ALL_DRAFTERS = NGRAM_DRAFTERS | MODEL_DRAFTERS | {"suffix", "corpus", "recycle", "lookahead", "prediction"}
OPTION_USERS = {  # drafters that use an option; plug-in drafters may use any
    "prompt_lookup_min": NGRAM_DRAFTERS,
    "prompt_lookup_max": NGRAM_DRAFTERS,
    "min_confidence": MODEL_DRAFTERS,
    "draft_temperature": MODEL_DRAFTERS,
    "draft_idle_unload": MODEL_DRAFTERS,
}
