"""The options of an engine and of speculation: frozen, validated, declared once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .options import option, strict

MAX_THREADS = 1024
DEFAULT_MAX_DRAFT = 16  # draft tokens per step
MAX_DRAFT = 64  # upper bound of draft tokens per step
DEFAULT_TREE = 63  # nodes of a draft tree
MAX_TREE = 255  # upper bound of nodes; with the last token the largest step that is captured as a CUDA graph
MIN_MATCH = 2  # default of the shortest n-gram, in tokens
MAX_MATCH = 4  # default of the longest n-gram, in tokens
LONGEST_MATCH = 64  # upper bound of both
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The target model, its memory and its limits."""

    model: str = option(
        "smollm2-135m",
        "target model: a folder, a .gguf file, a Hugging Face id or a built-in name",
        aliases=("--model-path", "-m"),
        common=True,
    )
    revision: str | None = option(None, "branch, tag or commit of the model's Hugging Face repository (default: main)")
    chat_template: str | None = option(
        None, "Jinja file of a chat template, or the template itself (default: the model's own)", metavar="FILE"
    )
    generation_config: str = option(
        "auto", "sampling defaults: auto (the model's own), vllm (none), or a folder with generation_config.json"
    )
    override_generation_config: str | None = option(
        None, """sampling defaults on top of those, as JSON such as '{"temperature": 0.6}'""", metavar="JSON"
    )
    dtype: str = option(
        "auto",
        "data type of float weights and activations",
        choices=("auto", "float32", "bfloat16", "float16", "half", "float"),
        metavar="{auto,float32,bfloat16,float16}",
    )
    quantization: str = option(
        "auto",
        "quantize the weights at load time: int8; int4 on a CPU, fp8 on CUDA; auto: int8 or int4 on a CPU if the file "
        "is quantized",
        aliases=("-q",),
        metavar=f"{{{','.join(QUANTIZATIONS)}}}",
        common=True,
    )
    device: str = option("auto", "device of the target: auto, cpu or cuda", common=True)
    max_model_len: int | None = option(
        None, "context length in tokens, prompt and output (default: the model's own)", common=True
    )
    rope_scaling: str | None = option(
        None,
        "extend the model's context by RoPE scaling: yarn:FACTOR or linear:FACTOR; the quality of the output may drop",
    )
    max_num_seqs: int = option(64, "maximum number of sequences per step", common=True)
    max_num_batched_tokens: int = option(
        2048, "maximum number of tokens per step; longer prompts are prefilled in chunks"
    )
    page_size: int = option(16, "tokens per KV cache page", aliases=("--block-size",))
    kv_cache_dtype: str = option(
        "auto",
        "data type of keys and values in the KV cache: auto (that of the model), or on a CPU another; int8 has a scale "
        "for each head and token",
        choices=KV_CACHE_DTYPES,
    )
    kv_memory: float | None = option(None, "KV cache size in GiB (default: by model and memory)", common=True)
    gpu_memory_utilization: float = option(
        0.9, "fraction of the GPU's free memory to use for weights, KV cache and workspace"
    )
    swap_space: float = option(
        4.0, "CPU swap space in GiB for KV pages of preempted sequences (GPU only); used where it beats recomputing"
    )
    keep_packed: bool = option(True, "cache packed CPU weights on disk, so that the next start loads them from there")
    prefix_cache: bool = option(
        True, "reuse the KV cache of shared prompt prefixes", aliases=("--enable-prefix-caching",)
    )
    threads: int | None = option(
        None, "CPU threads (default: physical cores), shared by all ranks", aliases=("-t",), common=True
    )
    tensor_parallel_size: int = option(
        1,
        "number of tensor-parallel ranks: processes with a shard of every layer, on CUDA one device each",
        aliases=("--tp-size", "--tp", "-tp"),
        common=True,
    )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
        for name in ("max_model_len", "kv_memory", "threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, f"must be above 0, not {value}")
        if self.quantization not in QUANTIZATIONS:
            *most, last = QUANTIZATIONS
            raise RequestError(
                "quantization",
                f"{self.quantization!r} is not supported here; use {', '.join(most)} or {last}; how a "
                "checkpoint itself is quantized (AWQ, GPTQ ...) is read from its config",
            )
        if not 0 <= self.swap_space < math.inf:
            raise RequestError("swap_space", f"must be 0 or more, not {self.swap_space}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                "gpu_memory_utilization", f"must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise RequestError("threads", f"must be {MAX_THREADS} or fewer, not {self.threads}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                "max_num_batched_tokens", f"must be at least max_num_seqs ({self.max_num_seqs}): one token per sequence"
            )


@strict
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Settings of drafting and verification."""

    drafter: str = option(
        "auto",
        "drafter, or several with commas: ngram, suffix, recycle, lookahead, corpus (of draft_corpus), model:NAME, "
        "self:int8, self:int4, exit:N, a head (eagle, block, medusa, mtp or distilled: the model's own, or with "
        ":FOLDER another), assistant:FOLDER, a head's folder, none; auto: suffix, recycle, and the head that ships for "
        "the model",
        common=True,
    )
    max_draft: int | None = option(
        None, f"maximum draft tokens per sequence and step (default: {DEFAULT_MAX_DRAFT})", common=True
    )
    tree_nodes: int | None = option(
        None,
        f"maximum nodes of a draft tree per sequence and step, with branches of at most max_draft; 0: chains only "
        f"(default: {DEFAULT_TREE}, or 0 with num_speculative_tokens)",
    )
    num_speculative_tokens: int | None = option(
        None, "fixed number of draft tokens per step; disables adaptive lengths", common=True
    )
    num_speculative_tokens_per_batch_size: str | None = option(
        None,
        "fixed number by batch size: [[1, 8, 5], [9, 64, 2]] is 5 for up to 8 sequences, 2 for up to 64, else 0",
    )
    goal: str = option(
        "latency", "what to optimize: the time of each sequence, or the total time", choices=("latency", "throughput")
    )
    min_confidence: float = option(
        0.0,
        "a draft model stops when the probability of its chain falls below this",
        aliases=("--draft-p-min", "--spec-draft-p-min"),
    )
    min_draft: int = option(
        0,
        "drafts with fewer tokens are dropped",
        aliases=("--draft-min", "--spec-draft-n-min", "--spec-ngram-mod-n-min"),
    )
    rule: str = option(
        "match", "verification rule: match, rejection, block or auto; lossy: confidence, typical, ensemble"
    )
    acceptance_threshold: float | None = option(
        None, "rule confidence: accept draft tokens of at least this draft probability (0.9)"
    )
    acceptance_threshold_lower: float | None = option(
        None, "rule confidence: reject below this draft probability (0.2)"
    )
    workload: str | None = option(None, "rule confidence: preset of the threshold: code, json, narrative or auto")
    draft_temperature: str = option(
        "fixed",
        "temperature of a draft model: the request's, or lower where its entropy is low",
        choices=("fixed", "entropy"),
    )
    draft_idle_unload: float | None = option(
        None, "seconds without use after which a draft model is unloaded, until it pays off again"
    )
    draft_device: str | None = option(None, "device of the draft model: cpu or cuda:N (default: the target's)")
    draft_revision: str | None = option(
        None,
        "branch, tag or commit of the draft model's Hugging Face repository (default: main)",
        aliases=("--speculative-draft-model-revision",),
    )
    draft_tensor_parallel_size: int = option(
        1,
        "tensor-parallel ranks of the draft model: 1 (on the target's first rank) or as many as the target",
        aliases=("--draft-tp", "--speculative-draft-tensor-parallel-size"),
    )
    prompt_lookup_min: int | None = option(
        None, f"drafter ngram: shortest n-gram to match, in tokens (default: {MIN_MATCH})"
    )
    prompt_lookup_max: int | None = option(
        None, f"drafter ngram: longest n-gram to look up, in tokens (default: {MAX_MATCH})"
    )

    draft_corpus: tuple[str, ...] = option(
        (),
        "file, or folder of text files such as a repository, to draft from (drafter corpus); may be repeated. With "
        "N= before it only requests with the Nth --api-key use it",
        metavar="FOLDER",
    )
    draft_corpus_memory: float = option(
        0.125, "memory in GiB for the index of all draft_corpus folders of an API key, and of those without one"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_corpus", _paths("draft_corpus", self.draft_corpus))
        if not 0 < self.draft_corpus_memory < math.inf:
            raise RequestError("draft_corpus_memory", f"must be above 0, not {self.draft_corpus_memory}")
        for name in ("max_draft", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_DRAFT:
                raise RequestError(name, f"must be between 0 and {MAX_DRAFT}, not {value}")
        if self.tree_nodes is not None and not 0 <= self.tree_nodes <= MAX_TREE:
            raise RequestError("tree_nodes", f"must be between 0 and {MAX_TREE}, not {self.tree_nodes}")
        if not 0 <= self.min_confidence <= 1:
            raise RequestError("min_confidence", f"must be between 0 and 1, not {self.min_confidence}")
        if self.draft_idle_unload is not None and not 0 < self.draft_idle_unload < math.inf:
            raise RequestError("draft_idle_unload", f"must be above 0, not {self.draft_idle_unload}")
        if not 0 <= self.min_draft <= MAX_DRAFT:
            raise RequestError("min_draft", f"must be between 0 and {MAX_DRAFT}, not {self.min_draft}")
        if self.goal not in ("latency", "throughput"):
            raise RequestError("goal", f"must be latency or throughput, not {self.goal!r}")
        if self.draft_lengths and self.num_speculative_tokens is not None:
            raise RequestError(
                "num_speculative_tokens", "conflicts with num_speculative_tokens_per_batch_size; give one of them"
            )
        if self.draft_temperature not in ("fixed", "entropy"):
            raise RequestError("draft_temperature", f"must be fixed or entropy, not {self.draft_temperature!r}")
        if self.draft_tensor_parallel_size < 1:
            raise RequestError(
                "draft_tensor_parallel_size", f"must be 1 or more, not {self.draft_tensor_parallel_size}"
            )
        for name in ("acceptance_threshold", "acceptance_threshold_lower", "workload"):
            if getattr(self, name) is not None and self.rule != "confidence":
                raise RequestError(
                    name, f"needs the rule confidence, and the rule is {self.rule}; set rule to confidence"
                )
        shortest, longest = self.match_lengths
        if not 1 <= shortest <= longest <= LONGEST_MATCH:
            raise RequestError(
                "prompt_lookup_min",
                f"and _max must be 1 to {LONGEST_MATCH}, in order, not {shortest} and {longest}",
            )

    @property
    def budget(self) -> int:
        """Return the maximum draft tokens per sequence and step."""
        if self.drafter == "none":
            return 0
        fixed, cap = self.num_speculative_tokens, self.max_draft
        if self.draft_lengths:
            fixed = max(nodes for _, _, nodes in self.draft_lengths)
        if fixed is None:
            return DEFAULT_MAX_DRAFT if cap is None else cap
        return fixed if cap is None else min(fixed, cap)

    @property
    def tree(self) -> int:
        """Return the maximum nodes of a draft tree; 0: drafters make chains."""
        if self.tree_nodes is not None:
            return self.tree_nodes
        return DEFAULT_TREE if self.fixed_lengths() is None else 0

    @property
    def draft_lengths(self) -> tuple[tuple[int, int, int], ...]:
        """Return rows of (min batch size, max batch size, draft tokens); empty unless lengths are set by batch size."""
        if self.num_speculative_tokens_per_batch_size is None:
            return ()
        return _batch_table(self.num_speculative_tokens_per_batch_size)

    def fixed_lengths(self) -> Callable[[int], int] | None:
        """Return the draft length by batch size if it is fixed; None if it adapts."""
        rows, always = self.draft_lengths, self.num_speculative_tokens
        if rows:
            return lambda batch: next((nodes for low, high, nodes in rows if low <= batch <= high), 0)
        return None if always is None else lambda batch: always

    @property
    def match_lengths(self) -> tuple[int, int]:
        """Return the shortest and longest n-gram to match; if one is left out, it follows the other."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = MIN_MATCH if longest is None else min(MIN_MATCH, longest)
        return shortest, max(MAX_MATCH, shortest) if longest is None else longest


def _paths(name: str, value: Any) -> tuple[str, ...]:
    """Return paths as strings; one path becomes a tuple of one."""
    try:
        return tuple(os.fspath(path) for path in ((value,) if isinstance(value, str | os.PathLike) else value))
    except TypeError:
        raise RequestError(name, f"must be paths, such as ['./src'], not {value!r}") from None


def _batch_table(text: str) -> tuple[tuple[int, int, int], ...]:
    """Parse rows of (min batch size, max batch size, draft tokens), the format of vLLM's option of this name."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        rows = None
    has_shape = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row) for row in rows
    )
    if not has_shape or not all(1 <= low <= high and 0 <= nodes <= MAX_DRAFT for low, high, nodes in rows) or not rows:
        raise RequestError(
            "num_speculative_tokens_per_batch_size",
            f"must be rows of min and max batch size and 0 to {MAX_DRAFT} draft tokens, such as "
            f"[[1, 8, 5], [9, 64, 2]], not {text}",
        )
    return tuple((low, high, nodes) for low, high, nodes in rows)
