"""What will lie in memory, counted before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.errors import CapacityError
from foretell.kv.cache import LayerShape
from foretell.models.draft_heads import HeadConfig
from foretell.runner.heads.tables import MAX_POSITIONS, next_power_of_2, padded_context

GIB = 1 << 30
DEFAULT_SEQUENCES = 4  # full-length texts the cache holds by default
CGROUP = Path("/sys/fs/cgroup")
LOGIT_ROWS = 256  # rows of a step whose logits lie in memory at once on a GPU
LIBRARY_BYTES = 256 << 20  # kernels, graphs and what cuBLAS works in
GRAPH_WORKSPACE = 64 << 20  # what graphs take in the driver, and what cuBLAS works in while they are recorded
SPLIT_KEYS, SHORT_SPLITS = 512, 20  # keys of a long part of a text's attention; parts before those
CACHE_FRACTION = 0.5  # of the memory left beside the weights, the most the cache takes by default


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part, and the pages that come of it."""

    weights: int
    drafter: int
    page_bytes: int
    pages: int
    workspace: int = 0  # what a step works with on a GPU: states, logits, recorded graphs

    @property
    def cache(self) -> int:
        return self.pages * self.page_bytes

    @property
    def total(self) -> int:
        return self.weights + self.drafter + self.workspace + self.cache

    def __str__(self) -> str:
        parts = [f"weights {_gib(self.weights)}", f"cache {_gib(self.cache)} ({self.pages} pages)"]
        if self.drafter:
            parts.insert(1, f"drafter {_gib(self.drafter)}")
        if self.workspace:
            parts.insert(-1, f"steps {_gib(self.workspace)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model asks of memory."""

    weights: int
    drafter: int
    page_bytes: int
    page_size: int
    context: int
    max_num_seqs: int
    loading: int = 0  # held for a while before the weights are what they will be
    workspace: int = 0
    sequences: int = DEFAULT_SEQUENCES  # full-length ones the cache holds, if there is room
    cache_fraction: float = CACHE_FRACTION  # of the memory left, the most the cache takes
    utilization: float = 1.0  # of the free memory, the most that all parts may take


def plan_memory(needs: MemoryNeeds, available: int, kv_memory: float | None) -> MemoryPlan:
    """As many pages as were asked for, or as fit well; refused where not even one text would fit."""
    one_text = -(-needs.context // needs.page_size)
    left = available - needs.weights - needs.drafter - needs.workspace
    if kv_memory is not None:
        pages = int(kv_memory * GIB) // needs.page_bytes
    else:
        wanted = one_text * min(needs.sequences, needs.max_num_seqs)
        pages = max(1, min(wanted, int(left * needs.cache_fraction) // needs.page_bytes))
    plan = MemoryPlan(needs.weights, needs.drafter, needs.page_bytes, pages, needs.workspace)
    _check(plan, needs, available, one_text)
    return plan


def _check(plan: MemoryPlan, needs: MemoryNeeds, available: int, one_text: int) -> None:
    fixed, there, more = plan.weights + plan.drafter + plan.workspace, f"{_gib(available)} is free", ""
    if needs.utilization < 1:
        there = f"{_gib(available)} may be taken, gpu_memory_utilization {needs.utilization:g} of what is free"
        more = "raise gpu_memory_utilization, "
    if fixed > available:
        parts = "the weights need" if not plan.workspace else "the weights and what steps work with need"
        raise CapacityError(f"{parts} {_gib(fixed)} and {there}; {more}take a smaller model or free some memory")
    if needs.loading > available:
        raise CapacityError(
            f"weights are loaded as floats before they are rounded, which needs {_gib(needs.loading)}, "
            f"and {there}; {more}take a smaller model or free some memory"
        )
    if plan.total > available:
        raise CapacityError(f"{plan} is {_gib(plan.total)} in all and {there}; {more}lower kv_memory or max_model_len")
    if plan.pages == 0:
        raise CapacityError(
            f"kv_memory has no room for even one page of {needs.page_size} tokens; raise it to "
            f"{_least_setting(one_text * needs.page_bytes)}, which holds one text of {needs.context} tokens"
        )
    if plan.pages < one_text:
        raise CapacityError(
            f"a text of {needs.context} tokens needs {_gib(one_text * needs.page_bytes)} of cache and there is "
            f"{_gib(plan.cache)}; {more}raise kv_memory or set max_model_len to {plan.pages * needs.page_size} or less"
        )


def check_draft_fits(needed: int, device: torch.device) -> None:
    """Refuse a draft model that does not fit on a device of its own, cache included."""
    free = device_memory(device)
    if needed > free:
        raise CapacityError(
            f"the draft model needs {_gib(needed)} on {device} and {_gib(free)} is free; lower kv_memory, or take "
            "another draft_device"
        )


def step_workspace(width: int, tokens: int, vocab: int, itemsize: int) -> int:
    """About what a step of `tokens` works with on a GPU, of a model `width` numbers a token go through at once."""
    return tokens * width * itemsize + LOGIT_ROWS * vocab * (4 + itemsize) + LIBRARY_BYTES


def graph_workspace(width: int, context: int, vocab: int, itemsize: int) -> int:
    """What recorded steps hold on to, and as much again, worked with before they were recorded: logits, and attention
    in parts, of query heads that are `width` numbers together."""
    parts = SHORT_SPLITS + -(-context // SPLIT_KEYS)
    return 2 * LOGIT_ROWS * (parts * width * 4 + vocab * itemsize) + GRAPH_WORKSPACE


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _least_setting(size: int) -> str:
    """The least value of kv_memory, in GiB to two places, that gives so many bytes."""
    return f"{math.ceil(size / GIB * 100) / 100:g}"


def device_memory(device: torch.device | str) -> int:
    """Bytes that can still be taken on the device."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def available_memory(group: Path = CGROUP) -> int:
    """Bytes this process may still take: what the machine has free, or what its control group leaves."""
    free = _meminfo().get("MemAvailable", 1 << 62)
    left = cgroup_memory(group)
    return free if left is None else min(free, left)


def cgroup_memory(group: Path) -> int | None:
    """What a control group leaves of its limit, if it has one."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    # Cached files count as used, but they make way: a model just fetched would shut itself out.
    stat = _counts(group / "memory.stat")
    cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, limit - max(0, used - cached))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _counts(path: Path) -> dict[str, int]:
    """The lines `name number` of a file."""
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


FLOAT_BYTES = 4  # bytes
LOGITS_COPIES = 4  # of logits: as they come, as shares, divided by noise, sorted
GRAPH_COPIES = 2  # each size of work runs plainly once, and then in the graphs' own memory


@dataclass(frozen=True)
class HeadLimits:
    """The most that is asked of heads."""

    sequences: int  # at once
    context: int
    tokens: int  # of a step
    depth: int  # of a draft
    tree_width: int  # branches that are followed in a level of a tree
    page_size: int


@dataclass(frozen=True)
class HeadMemoryNeeds:
    """Bytes of some heads."""

    weights: int = 0
    kv_bytes_per_token: int = 0  # of cache
    workspace: int = 0
    wiring_check: int = 0  # held for a while after the target was loaded


def head_workspace(config: HeadConfig, shapes: tuple[LayerShape, ...], asked: HeadLimits, dtype: torch.dtype) -> int:
    """Of one head, whose layers in the cache have these shapes: its drafts, what it reads, and their graphs."""
    texts, columns = next_power_of_2(asked.sequences), padded_context(asked.context)
    rows = texts * max(asked.tree_width, asked.depth)
    places = max(columns, min(MAX_POSITIONS, texts * columns)) + rows * max(asked.tree_width, asked.depth)
    copied = sum(shape.bytes_per_token(dtype) for shape in shapes if shape.has_values)
    share = config.layer.heads // config.layer.kv_heads
    masks = asked.tree_width * (1 + (1 + share) * dtype.itemsize)
    drafts = places * (copied + masks) + rows * config.outputs * FLOAT_BYTES * LOGITS_COPIES
    probs = asked.depth * texts * config.outputs * FLOAT_BYTES
    # States wait until a page of each text is full; those of a prompt are there twice when they are put together.
    waiting = 2 * asked.tokens + (asked.page_size + 2) * LOGIT_ROWS
    states = waiting * config.input_width * dtype.itemsize
    return GRAPH_COPIES * (drafts + probs + GRAPH_WORKSPACE) + states
