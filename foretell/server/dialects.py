"""The flags of vLLM, SGLang, llama.cpp and MLX that say something about an engine, in our own settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretell.config import METHODS, ONE_DEVICE, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest, option, strict

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
class Dialect:
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
        None, "SGLang's and llama.cpp's names of drafters, such as NGRAM or STANDALONE", aliases=("--spec-type",)
    )
    speculative_num_steps: int | None = option(None, "SGLang: how many tokens deep a draft is")
    speculative_num_draft_tokens: int | None = option(None, "SGLang: tokens of a draft, the one it hangs on included")
    speculative_eagle_topk: int | None = option(None, "SGLang: branches of a draft at each token; 1 is a chain")
    num_draft_tokens: int | None = option(None, "MLX: the same as --num-speculative-tokens")
    draft_max: int | None = option(
        None,
        "llama.cpp: the same as --max-draft",
        aliases=("--draft", "--draft-n", "--spec-draft-n-max"),
    )
    tensor_parallel_size: int = option(
        1, "devices the model is split over; only 1 for now", aliases=("-tp", "--tp-size", "--tp")
    )
    speculative_draft_tensor_parallel_size: int = option(1, "the same for the draft model")
    context_length: int | None = option(
        None, "SGLang, llama.cpp: the same as --max-model-len", aliases=("--ctx-size", "-c")
    )
    max_running_requests: int | None = option(
        None, "SGLang, llama.cpp: the same as --max-num-seqs", aliases=("--parallel", "-np")
    )

    mem_fraction_static: float | None = option(None, "SGLang: the same as --gpu-memory-utilization")

    def engine_options(self) -> dict[str, Any]:
        """What it says of the engine."""
        for name in ("tensor_parallel_size", "speculative_draft_tensor_parallel_size"):
            if getattr(self, name) != 1:
                raise RequestError(name, ONE_DEVICE)
        given = {
            "max_model_len": self.context_length,
            "max_num_seqs": self.max_running_requests,
            "gpu_memory_utilization": self.mem_fraction_static,
        }
        return {name: value for name, value in given.items() if value is not None}

    def speculation_options(self) -> dict[str, Any]:
        """What it says of guessing ahead."""
        given = {
            "drafter": self._drafter(),
            "num_speculative_tokens": _agreed("num_draft_tokens", self.num_draft_tokens, self._chain()),
            "max_draft": self.draft_max,
            "tree_nodes": self._tree(),
        }
        return {name: value for name, value in given.items() if value is not None}

    def _drafter(self) -> str | None:
        if self.speculative_algorithm is None:
            method = None
        elif (name := self.speculative_algorithm.upper().replace("_", "-")) in ALGORITHMS:
            method = ALGORITHMS[name]
        else:
            raise RequestError(
                "speculative_algorithm", f"{self.speculative_algorithm!r} is not known; {nearest(name, ALGORITHMS)}"
            )
        if method is None and self.speculative_model is None:
            return None
        if METHODS.get(method or "") == "model" and self.speculative_model is None:
            raise RequestError("speculative_algorithm", f"{self.speculative_algorithm} needs --speculative-draft-model")
        named = {"method": method, "model": self.speculative_model}
        return SpeculationConfig.from_vllm({name: value for name, value in named.items() if value}).drafter

    def _tree(self) -> int | None:
        """Its nodes, where there are to be branches; how many at each token is left to what is likely there."""
        if self.speculative_eagle_topk in (None, 1):
            return None
        if self.speculative_num_steps is None or self.speculative_num_draft_tokens is None:
            raise RequestError(
                "speculative_eagle_topk", "needs --speculative-num-steps and --speculative-num-draft-tokens beside it"
            )
        return self.speculative_num_draft_tokens - 1

    def _chain(self) -> int | None:
        """SGLang's three numbers as the length of a chain, or of a tree's branches. Of its tokens one is no guess: the
        draft hangs on it."""
        if self._tree() is not None:
            return self.speculative_num_steps
        nodes = None if self.speculative_num_draft_tokens is None else self.speculative_num_draft_tokens - 1
        lengths = [length for length in (self.speculative_num_steps, nodes) if length is not None]
        return min(lengths) if lengths else None


def merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Settings given in our words and in another engine's; two that differ are refused."""
    return {name: _agreed(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs))}


def _agreed(name: str, *values: Any) -> Any:
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(name, f"is given twice, as {given[0]!r} and {given[1]!r}; give it once")
    return given[0] if given else None


def check_speculation(config: SpeculationConfig, given: Sequence[str]) -> None:
    """Refuse settings of drafts where nothing drafts: a flag that does nothing misleads."""
    idle = [name for name in given if name != "drafter"]
    if config.drafter == "none" and idle:
        raise RequestError(idle[0], "has nothing to do with --drafter none; leave one of them out")


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
