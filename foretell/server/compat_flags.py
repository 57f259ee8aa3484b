"""The flags of vLLM, SGLang, llama.cpp and MLX that say something about an engine, in our own settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest, option, strict
from foretell.vllm_config import METHODS, speculation_from_vllm

# SGLang's and llama.cpp's words for a method, and vLLM's.
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
    "NGRAM-SIMPLE": "ngram",
    "NGRAM-MAP-K": "ngram",
    "NGRAM-MOD": "ngram",
}


@strict
@dataclass(frozen=True, kw_only=True)
class CompatFlags:
    """What other engines call things."""

    speculative_model: str | None = option(
        None,
        "a draft model; the same as --drafter model:NAME",
        aliases=(
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            "--draft-model",
            "--model-draft",
            "-md",
        ),
    )
    speculative_algorithm: str | None = option(
        None,
        "SGLang's and llama.cpp's names of drafters, such as NGRAM or STANDALONE; several with commas",
        aliases=("--spec-type",),
    )
    speculative_num_steps: int | None = option(None, "SGLang: how many tokens deep a draft is")
    speculative_num_draft_tokens: int | None = option(None, "SGLang: tokens of a draft, the one it hangs on included")
    speculative_eagle_topk: int | None = option(
        None, "SGLang: branches of a draft at each token; 1 is a chain, above that the controller chooses the width"
    )
    num_draft_tokens: int | None = option(None, "MLX: the same as --num-speculative-tokens")
    draft_max: int | None = option(
        None,
        "llama.cpp: the same as --max-draft",
        aliases=("--draft", "--draft-n", "--spec-draft-n-max", "--spec-ngram-size-m"),
    )
    spec_ngram_size_n: int | None = option(None, "llama.cpp: the length of a run that counts as a match")
    context_length: int | None = option(
        None, "SGLang, llama.cpp: the same as --max-model-len", aliases=("--ctx-size", "-c")
    )
    max_running_requests: int | None = option(
        None, "SGLang, llama.cpp: the same as --max-num-seqs", aliases=("--parallel", "-np")
    )

    mem_fraction_static: float | None = option(None, "SGLang: the same as --gpu-memory-utilization")

    def engine_options(self) -> dict[str, Any]:
        """What it says of the engine."""
        given = {
            "max_model_len": self.context_length,
            "max_num_seqs": self.max_running_requests,
            "gpu_memory_utilization": self.mem_fraction_static,
        }
        return {name: value for name, value in given.items() if value is not None}

    def speculation_options(self) -> dict[str, Any]:
        """What it says of guessing ahead."""
        chain, most, tree = self._sizes()
        given = {
            "drafter": self._drafter(),
            "num_speculative_tokens": _agreed("num_draft_tokens", self.num_draft_tokens, chain),
            "max_draft": _agreed("draft_max", self.draft_max, most),
            "tree_nodes": tree,
            "prompt_lookup_min": self.spec_ngram_size_n,
            "prompt_lookup_max": self.spec_ngram_size_n,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def remarks(self) -> list[str]:
        """Flags that are not taken at their word, and what is done."""
        if (self.speculative_eagle_topk or 1) == 1:
            return []
        return [f"--speculative-eagle-topk {self.speculative_eagle_topk} (the controller chooses how wide a draft is)"]

    def _drafter(self) -> str | None:
        if self.speculative_algorithm is None:
            return None if self.speculative_model is None else _named(None, self.speculative_model)
        methods = [_method(name.strip()) for name in self.speculative_algorithm.split(",")]
        if "none" in methods and len(methods) > 1:
            raise RequestError("speculative_algorithm", "names none and others; leave one of them out")
        for method in methods:
            if METHODS[method] == "model" and self.speculative_model is None:
                words = f"{self.speculative_algorithm} needs --speculative-draft-model"
                raise RequestError("speculative_algorithm", words)
        return ",".join(dict.fromkeys(_named(method, self.speculative_model) for method in methods))

    def _sizes(self) -> tuple[int | None, int | None, int | None]:
        """SGLang's three numbers: the length of a chain or of a tree's branches, the most nodes where only one number
        speaks of a tree, and a tree's nodes. It counts the token a draft hangs on; we do not."""
        nodes = None if self.speculative_num_draft_tokens is None else self.speculative_num_draft_tokens - 1
        sizes = [size for size in (self.speculative_num_steps, nodes) if size is not None]
        if (self.speculative_eagle_topk or 1) < 1:
            raise RequestError("speculative_eagle_topk", f"must be 1 or more, not {self.speculative_eagle_topk}")
        if self.speculative_eagle_topk in (None, 1):
            return min(sizes, default=None), None, None
        if len(sizes) == 2:
            return self.speculative_num_steps, None, nodes
        return None, max(sizes, default=None), None


def _method(word: str) -> str:
    name = word.upper().replace("_", "-")
    if name not in ALGORITHMS:
        raise RequestError("speculative_algorithm", f"{word!r} is not known; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def _named(method: str | None, model: str | None) -> str:
    """The drafter of a method, or of a model's name alone."""
    given = {"method": method, "model": model}
    return speculation_from_vllm({name: value for name, value in given.items() if value}).drafter


def merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Settings given in our words and in another engine's; two that differ are refused."""
    return {name: _agreed(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs))}


def _agreed(name: str, *values: Any) -> Any:
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(name, f"is given twice, as {given[0]!r} and {given[1]!r}; give it once")
    return given[0] if given else None


def check_speculation(config: SpeculationConfig) -> None:
    """Refuse settings that can do nothing: a flag that does nothing misleads."""
    changed = [f.name for f in fields(config) if f.name != "drafter" and getattr(config, f.name) != f.default]
    if config.drafter == "none" and changed:
        raise RequestError(changed[0], "has nothing to do with --drafter none; leave one of them out")
    named = {name.strip().partition(":")[0] for name in config.drafter.split(",")}
    for name in changed:
        wanted = OF_COPIES if name in LOOKUPS else OF_MODELS if name in DRAWING else None
        if wanted is not None and named <= ALL - wanted:
            raise RequestError(name, f"has nothing to do with --drafter {config.drafter}; leave one of them out")
    if config.min_draft > config.budget:
        raise RequestError("min_draft", f"{config.min_draft} is more than the {config.budget} that are guessed at most")


# What settings of drafts are for; of drafters from other packages nobody knows.
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
DRAWING = ("min_confidence", "draft_temperature", "draft_idle_unload")
OF_COPIES = frozenset(("auto", "ngram"))
OF_MODELS = frozenset(("model", "self", "exit", "eagle", "block", "medusa", "mtp", "distilled"))
ALL = OF_COPIES | OF_MODELS | {"suffix", "recycle", "lookahead", "prediction"}


# Flags of other engines that mean nothing here: there is nothing to switch, or it is always on.
SWITCHES = (
    "--async-scheduling",
    "--cont-batching",
    "--disable-cuda-graph",
    "--disable-custom-all-reduce",
    "--disable-frontend-multiprocessing",
    "--disable-log-requests",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--enable-torch-compile",
    "--enforce-eager",
    "--jinja",
    "--metrics",
    "--mlock",
    "--no-enable-chunked-prefill",
    "--no-mmap",
    "--slots",
    "--speculative-adaptive",
    "--trust-remote-code",
    "--use-default-chat-template",
    "--use-v2-block-manager",
)
WITH_VALUES = (
    "--attention-backend",
    "--chunked-prefill-size",
    "--compilation-config",
    "--cuda-graph-max-bs",
    "--device-draft",
    "--distributed-executor-backend",
    "--gpu-layers",
    "--gpu-layers-draft",
    "--guided-decoding-backend",
    "--kv-cache-dtype",
    "--load-format",
    "--log-level",
    "--max-log-len",
    "--max-seq-len-to-capture",
    "--n-gpu-layers",
    "--num-scheduler-steps",
    "--schedule-conservativeness",
    "--schedule-policy",
    "--spec-ngram-min-hits",
    "--tokenizer-mode",
    "--ubatch-size",
    "--uvicorn-log-level",
    "-cd",
    "-ctk",
    "-ctv",
    "-devd",
    "-ngl",
    "-ngld",
    "-ub",
)
EITHER = ("--disable-flashinfer", "--flash-attn", "-fa")  # written with a value and without


class _Foreign(argparse.Action):
    """Notes a flag that means nothing here."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        namespace.foreign = [*getattr(namespace, "foreign", []), flag]


def add_foreign_flags(parser: argparse._ActionsContainer) -> None:
    """Let the flags in; `namespace.foreign` has those that were given."""
    for flags, nargs in ((SWITCHES, 0), (WITH_VALUES, None), (EITHER, "?")):
        for flag in flags:
            parser.add_argument(
                flag, nargs=nargs, action=_Foreign, dest="foreign", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
