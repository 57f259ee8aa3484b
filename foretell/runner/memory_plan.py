"""Memory plan: how many bytes weights, drafters, workspaces and the KV cache take, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.errors import CapacityError
from foretell.kv.cache import LayerShape
from foretell.models.draft_heads import HeadConfig
from foretell.runner.cuda.graph_shapes import next_power_of_2
from foretell.runner.heads.tables import MAX_POSITIONS, padded_context

GIB = 1 << 30
DEFAULT_SEQUENCES = 4  # sequences of full length that the KV cache holds by default
CGROUP = Path("/sys/fs/cgroup")
LOGIT_ROWS = 256  # rows of a step whose logits are in GPU memory at once
LIBRARY_BYTES = 256 << 20  # kernels, CUDA graphs and the workspace of cuBLAS
GRAPH_WORKSPACE = 64 << 20  # bytes that graphs take in the driver, and cuBLAS while they are captured
SPLIT_KEYS = 512  # keys per split of a long attention
SHORT_SPLITS = 20  # shorter splits before those
CACHE_FRACTION = 0.5  # share of the memory left after the weights that the KV cache takes by default, at most
FLOAT_BYTES = 4
LOGITS_COPIES = 4  # of a head's logits: raw, as probabilities, divided by noise, sorted
GRAPH_COPIES = 2  # each shape runs eagerly once, and then in the graphs' own memory


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part, and the pages of the KV cache."""

    weights: int
    drafter: int
    page_bytes: int
    pages: int
    workspace: int = 0  # of a step on a GPU: activations, logits, CUDA graphs

    @property
    def cache(self) -> int:
        """Return the bytes of the KV cache."""
        return self.pages * self.page_bytes

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return self.weights + self.drafter + self.workspace + self.cache

    def __str__(self) -> str:
        parts = [f"weights {_gib(self.weights)}", f"KV cache {_gib(self.cache)} ({self.pages} pages)"]
        if self.drafter:
            parts.insert(1, f"drafter {_gib(self.drafter)}")
        if self.workspace:
            parts.insert(-1, f"workspace {_gib(self.workspace)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a model needs, and limits for its KV cache."""

    weights: int
    drafter: int
    page_bytes: int
    page_size: int
    context: int
    max_num_seqs: int
    loading: int = 0  # peak while weights load, before they are quantized
    workspace: int = 0
    sequences: int = DEFAULT_SEQUENCES  # of full length that the KV cache should hold
    cache_fraction: float = CACHE_FRACTION  # share of the memory left that the KV cache takes, at most
    utilization: float = 1.0  # share of the free memory that all parts may take


def plan_memory(needs: MemoryNeeds, available: int, kv_memory: float | None) -> MemoryPlan:
    """Choose the number of pages: `kv_memory` GiB if set, else a default that fits.

    Raises CapacityError if the KV cache cannot hold one sequence of full length.
    """
    pages_per_sequence = -(-needs.context // needs.page_size)
    left = available - needs.weights - needs.drafter - needs.workspace
    if kv_memory is not None:
        pages = int(kv_memory * GIB) // needs.page_bytes
    else:
        wanted = pages_per_sequence * min(needs.sequences, needs.max_num_seqs)
        pages = max(1, min(wanted, int(left * needs.cache_fraction) // needs.page_bytes))
    plan = MemoryPlan(needs.weights, needs.drafter, needs.page_bytes, pages, needs.workspace)
    _check(plan, needs, available, pages_per_sequence)
    return plan


def _check(plan: MemoryPlan, needs: MemoryNeeds, available: int, pages_per_sequence: int) -> None:
    fixed, free, more = plan.weights + plan.drafter + plan.workspace, f"{_gib(available)} is free", ""
    if needs.utilization < 1:
        free = f"{_gib(available)} may be used (gpu_memory_utilization {needs.utilization:g} of the free memory)"
        more = "raise gpu_memory_utilization, "
    if fixed > available:
        parts = "weights need" if not plan.workspace else "weights and workspace need"
        raise CapacityError(f"{parts} {_gib(fixed)}, and {free}; {more}use a smaller model or free some memory")
    if needs.loading > available:
        raise CapacityError(
            f"weights are loaded as floats before they are quantized, which needs {_gib(needs.loading)}, "
            f"and {free}; {more}use a smaller model or free some memory"
        )
    if plan.total > available:
        raise CapacityError(f"{plan}: {_gib(plan.total)} in total, and {free}; {more}lower kv_memory or max_model_len")
    if plan.pages == 0:
        raise CapacityError(
            f"kv_memory is too small for one page of {needs.page_size} tokens; raise it to "
            f"{_least_setting(pages_per_sequence * needs.page_bytes)}, which holds one sequence of "
            f"{needs.context} tokens"
        )
    if plan.pages < pages_per_sequence:
        raise CapacityError(
            f"a sequence of {needs.context} tokens needs {_gib(pages_per_sequence * needs.page_bytes)} of KV cache, "
            f"and there is {_gib(plan.cache)}; {more}raise kv_memory or set max_model_len to "
            f"{plan.pages * needs.page_size} or less"
        )


def check_draft_fits(needed: int, device: torch.device) -> None:
    """Raise CapacityError if a draft model and its KV cache do not fit on a device of their own."""
    free = device_memory(device)
    if needed > free:
        raise CapacityError(
            f"the draft model needs {_gib(needed)} on {device}, and {_gib(free)} is free; lower kv_memory, or use "
            "another draft_device"
        )


def step_workspace(width: int, tokens: int, vocab: int, itemsize: int) -> int:
    """Estimate the GPU memory of a step of `tokens` rows with `width` activations per row."""
    return tokens * width * itemsize + LOGIT_ROWS * vocab * (4 + itemsize) + LIBRARY_BYTES


def graph_workspace(width: int, context: int, vocab: int, itemsize: int) -> int:
    """Return the bytes that captured steps hold: logits, and split attention of query heads of `width` in total.

    They count twice: a step runs eagerly before it is captured.
    """
    splits = SHORT_SPLITS + -(-context // SPLIT_KEYS)
    return 2 * LOGIT_ROWS * (splits * width * 4 + vocab * itemsize) + GRAPH_WORKSPACE


@dataclass(frozen=True)
class HeadLimits:
    """Upper bounds of the drafts of heads."""

    sequences: int  # at once
    context: int
    tokens: int  # of a step
    depth: int  # of a draft
    tree_width: int  # branches expanded per level of a tree
    page_size: int


@dataclass(frozen=True)
class HeadMemoryNeeds:
    """Bytes that draft heads need."""

    weights: int = 0
    kv_bytes_per_token: int = 0
    workspace: int = 0
    wiring_check: int = 0  # held for a while after the target was loaded


def head_workspace(config: HeadConfig, shapes: tuple[LayerShape, ...], limits: HeadLimits, dtype: torch.dtype) -> int:
    """Return the GPU memory of one head's drafts, prefills and CUDA graphs; `shapes` are its KV cache layers."""
    sequences, columns = next_power_of_2(limits.sequences), padded_context(limits.context)
    rows = sequences * max(limits.tree_width, limits.depth)
    positions = max(columns, min(MAX_POSITIONS, sequences * columns)) + rows * max(limits.tree_width, limits.depth)
    copied = sum(shape.bytes_per_token(dtype, dtype) for shape in shapes if shape.has_values)
    queries_per_kv_head = config.layer.heads // config.layer.kv_heads
    masks = limits.tree_width * (1 + (1 + queries_per_kv_head) * dtype.itemsize)
    drafts = positions * (copied + masks) + rows * config.outputs * FLOAT_BYTES * LOGITS_COPIES
    probs = limits.depth * sequences * config.outputs * FLOAT_BYTES
    # Hidden states wait until a page of each sequence is full; those of a prompt exist twice while they are joined.
    waiting = 2 * limits.tokens + (limits.page_size + 2) * LOGIT_ROWS
    states = waiting * config.input_width * dtype.itemsize
    return GRAPH_COPIES * (drafts + probs + GRAPH_WORKSPACE) + states


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _least_setting(size: int) -> str:
    """Return the smallest kv_memory, in GiB with two decimals, that provides `size` bytes."""
    return f"{math.ceil(size / GIB * 100) / 100:g}"


def device_memory(device: torch.device | str) -> int:
    """Return the free bytes of a device."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def available_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes this process may still allocate: the machine's free memory, or what its cgroup leaves."""
    free = _meminfo().get("MemAvailable", 1 << 62)
    left = cgroup_memory(cgroup)
    return free if left is None else min(free, left)


def cgroup_memory(cgroup: Path) -> int | None:
    """Return the bytes that a cgroup leaves of its limit; None without a limit."""
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as used but is evicted on demand; otherwise a model just downloaded would not fit.
    stat = _counts(cgroup / "memory.stat")
    cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, limit - max(0, used - cached))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _counts(path: Path) -> dict[str, int]:
    """Parse the lines `name number` of a file."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
