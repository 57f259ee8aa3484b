"""What an engine is made of: frozen, checked, declared once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from .errors import RequestError
from .options import option, strict

MOST_THREADS = 1024
DEFAULT_DRAFT, MOST_DRAFTED = 16, 64
DEFAULT_TREE, MOST_NODES = 63, 255  # with the last token the most rows that a device records
SHORTEST_MATCH, LONGEST_MATCH, LONGEST_RUN = 2, 4, 64
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The model and the room it gets."""

    model: str = option(
        "smollm2-135m", "a folder, a .gguf file, a Hugging Face id or a built-in name", aliases=("--model-path", "-m")
    )
    revision: str | None = option(
        None, "a branch, a tag or a commit of the model's Hugging Face repository (default: main)"
    )
    dtype: str = option("auto", "float type of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = option(
        "auto",
        "round the weights when they are loaded: int8; int4 on a CPU, fp8 on CUDA; auto: on a CPU to int8 where the "
        "file's own are rounded",
        choices=QUANTIZATIONS,
    )
    device: str = option("auto", "where to run: auto, cpu or cuda")
    max_model_len: int | None = option(None, "the longest text in tokens, prompt included (default: the model's own)")
    max_num_seqs: int = option(64, "the most texts written at once")
    max_num_batched_tokens: int = option(2048, "the most tokens run in one step; longer prompts take several")
    page_size: int = option(16, "tokens a page of the cache holds", aliases=("--block-size",))
    kv_memory: float | None = option(None, "GiB for the cache of keys and values (default: by model and memory)")
    gpu_memory_utilization: float = option(0.9, "the most of a GPU's free memory that all parts may take")
    swap_space: float = option(
        4.0, "GiB of the host's memory for texts that must make way on a GPU, where copying beats reading them again"
    )
    keep_packed: bool = option(
        True, "keep weights on disk as a CPU runs them, so that the next start takes them from there"
    )
    prefix_cache: bool = option(True, "share the cache of equal beginnings", aliases=("--enable-prefix-caching",))
    threads: int | None = option(None, "CPU threads (default: physical cores); ranks share them")
    tensor_parallel_size: int = option(
        1,
        "ranks the model is split over: processes that each have a part of every layer, on CUDA a device each",
        aliases=("--tp-size", "--tp", "-tp"),
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
            raise RequestError("quantization", f"must be {', '.join(QUANTIZATIONS)}; not {self.quantization!r}")
        if not 0 <= self.swap_space < math.inf:
            raise RequestError("swap_space", f"must be 0 or more, not {self.swap_space}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                "gpu_memory_utilization", f"must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.threads is not None and self.threads > MOST_THREADS:
            raise RequestError("threads", f"must be {MOST_THREADS} or fewer, not {self.threads}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                "max_num_batched_tokens", f"must be at least max_num_seqs ({self.max_num_seqs}): a token a text"
            )


@strict
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How to guess ahead."""

    drafter: str = option(
        "auto",
        "how to guess ahead: none, ngram, suffix, recycle, lookahead, model:NAME, self:int8, self:int4, exit:N, a head "
        "(eagle, block, medusa, mtp, distilled: the one for this model, or with :FOLDER another), a head's folder, or "
        "several to choose from, with commas; auto is suffix,recycle, and ngram for requests that name it",
    )
    max_draft: int | None = option(None, f"the most tokens guessed for a text in one step (default: {DEFAULT_DRAFT})")
    tree_nodes: int | None = option(
        None,
        f"the most nodes of a tree of guesses for a text in one step, with branches of at most max_draft; 0 is chains "
        f"only (default: {DEFAULT_TREE}, and 0 where num_speculative_tokens is given)",
    )
    num_speculative_tokens: int | None = option(None, "guess just this many each step and do not adapt")
    num_speculative_tokens_per_batch_size: str | None = option(
        None,
        "the same by the number of texts at once: [[1, 8, 5], [9, 64, 2]] is 5 for up to 8 texts, 2 up to 64, else 0",
    )
    goal: str = option(
        "latency", "what drafts are to shorten: each text's own time, or that of all", choices=("latency", "throughput")
    )
    min_confidence: float = option(
        0.0,
        "a draft model stops where its chain is less likely than this",
        aliases=("--draft-p-min", "--spec-draft-p-min"),
    )
    min_draft: int = option(0, "drafts of fewer tokens are not checked", aliases=("--draft-min", "--spec-draft-n-min"))
    rule: str = option(
        "match", "which guesses stand: match, rejection, block or auto; lossy: confidence, typical, ensemble"
    )
    acceptance_threshold: float | None = option(
        None, "confidence: accept outright from this draft probability on (0.9)"
    )
    acceptance_threshold_lower: float | None = option(None, "confidence: reject below this draft probability (0.2)")
    workload: str | None = option(None, "confidence: a preset of the threshold: code, json, narrative or auto")
    draft_temperature: str = option(
        "fixed",
        "how a draft model draws: as asked, or closer to its likeliest where it is sure",
        choices=("fixed", "entropy"),
    )
    draft_idle_unload: float | None = option(
        None, "seconds without use after which a draft model's memory is given back until it pays again"
    )
    draft_device: str | None = option(None, "where a draft model runs: cpu or cuda:N (default: where the target does)")
    draft_revision: str | None = option(
        None, "a branch, a tag or a commit of a draft model's Hugging Face repository (default: main)"
    )
    draft_tensor_parallel_size: int = option(
        1,
        "ranks a draft model is split over: 1, whole on the target's first, or as many as the target",
        aliases=("--draft-tp", "--speculative-draft-tensor-parallel-size"),
    )
    prompt_lookup_min: int | None = option(
        None, f"n-gram: the shortest run of tokens that counts as a match (default: {SHORTEST_MATCH})"
    )
    prompt_lookup_max: int | None = option(
        None, f"n-gram: the longest run of tokens that is looked up (default: {LONGEST_MATCH})"
    )

    def __post_init__(self) -> None:
        for name in ("max_draft", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST_DRAFTED:
                raise RequestError(name, f"must be between 0 and {MOST_DRAFTED}, not {value}")
        if self.tree_nodes is not None and not 0 <= self.tree_nodes <= MOST_NODES:
            raise RequestError("tree_nodes", f"must be between 0 and {MOST_NODES}, not {self.tree_nodes}")
        if not 0 <= self.min_confidence <= 1:
            raise RequestError("min_confidence", f"must be between 0 and 1, not {self.min_confidence}")
        if self.draft_idle_unload is not None and not 0 < self.draft_idle_unload < math.inf:
            raise RequestError("draft_idle_unload", f"must be above 0, not {self.draft_idle_unload}")
        if not 0 <= self.min_draft <= MOST_DRAFTED:
            raise RequestError("min_draft", f"must be between 0 and {MOST_DRAFTED}, not {self.min_draft}")
        if self.goal not in ("latency", "throughput"):
            raise RequestError("goal", f"must be latency or throughput, not {self.goal!r}")
        if self.draft_lengths and self.num_speculative_tokens is not None:
            raise RequestError("num_speculative_tokens", "is given twice: once alone and once by batch size; give one")
        if self.draft_temperature not in ("fixed", "entropy"):
            raise RequestError("draft_temperature", f"must be fixed or entropy, not {self.draft_temperature!r}")
        if self.draft_tensor_parallel_size < 1:
            words = f"must be 1 or more, not {self.draft_tensor_parallel_size}"
            raise RequestError("draft_tensor_parallel_size", words)
        for name in ("acceptance_threshold", "acceptance_threshold_lower", "workload"):
            if getattr(self, name) is not None and self.rule != "confidence":
                raise RequestError(name, f"is for the rule confidence, and the rule is {self.rule}; set rule to it")
        shortest, longest = self.match_lengths
        if not 1 <= shortest <= longest <= LONGEST_RUN:
            raise RequestError(
                "prompt_lookup_min",
                f"and _max must be 1 to {LONGEST_RUN}, in order, not {shortest} and {longest}",
            )

    @property
    def budget(self) -> int:
        """The most nodes a step may draft for a sequence."""
        if self.drafter == "none":
            return 0
        fixed, cap = self.num_speculative_tokens, self.max_draft
        if self.draft_lengths:
            fixed = max(nodes for _, _, nodes in self.draft_lengths)
        if fixed is None:
            return DEFAULT_DRAFT if cap is None else cap
        return fixed if cap is None else min(fixed, cap)

    @property
    def tree(self) -> int:
        """The most nodes of a tree for a sequence; 0: drafters that are asked make chains."""
        if self.tree_nodes is not None:
            return self.tree_nodes
        return DEFAULT_TREE if self.fixed_lengths() is None else 0

    @property
    def draft_lengths(self) -> tuple[tuple[int, int, int], ...]:
        """Rows of (from, to, nodes) by the number of texts at once; empty where lengths adapt or are one for all."""
        if self.num_speculative_tokens_per_batch_size is None:
            return ()
        return _batch_table(self.num_speculative_tokens_per_batch_size)

    def fixed_lengths(self) -> Callable[[int], int] | None:
        """Nodes for a text among so many, where that is set and not to be adapted."""
        rows, always = self.draft_lengths, self.num_speculative_tokens
        if rows:
            return lambda batch: next((nodes for low, high, nodes in rows if low <= batch <= high), 0)
        return None if always is None else lambda batch: always

    @property
    def match_lengths(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens looked up; where one is left out it follows the other."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = SHORTEST_MATCH if longest is None else min(SHORTEST_MATCH, longest)
        return shortest, max(LONGEST_MATCH, shortest) if longest is None else longest


def _batch_table(text: str) -> tuple[tuple[int, int, int], ...]:
    """vLLM's rows of the smallest batch, the largest, and the tokens to guess."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        rows = None
    whole = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row) for row in rows
    )
    if not whole or not all(1 <= low <= high and 0 <= nodes <= MOST_DRAFTED for low, high, nodes in rows) or not rows:
        raise RequestError(
            "num_speculative_tokens_per_batch_size",
            f"must be rows of from, to and 0 to {MOST_DRAFTED} tokens, such as [[1, 8, 5], [9, 64, 2]], not {text}",
        )
    return tuple((low, high, nodes) for low, high, nodes in rows)
