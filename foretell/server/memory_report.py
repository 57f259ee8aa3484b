"""The most memory a server takes, and what it is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretell.build.engine_builder import Assembly
    from foretell.config import EngineConfig

GIB = 1 << 30
OURS = Path("/proc/self")
# Of a step's logits, where tokens are drawn: probabilities, noise in 64 bits, and what the C library keeps in between;
# measured with 64 texts and 49152 tokens.
COPIES = 26


@dataclass(frozen=True)
class MemoryReport:
    """Bytes. Pages of the cache take memory when they are first written to; after a while all of them have been.

    `program` is what the process has taken beside the model when all is loaded: Python, torch, the tokenizer. `step` is
    what the largest step takes for its rows and for the logits of every text.
    """

    weights: int
    drafter: int
    cache: int
    pages: int
    activations: int
    process: int
    peak: int = 0  # the most the process has taken so far, while it loaded the model
    now: int = 0  # what the process has of the machine's memory when all is loaded
    files: int = 0  # of that, pages of files: libraries and mapped weights, which other processes may share
    device: str = "cpu"

    @classmethod
    def measure(cls, assembly: Assembly, config: EngineConfig, ours: Path = OURS) -> MemoryReport:
        """To be measured when all is loaded and nothing was written."""
        plan, device = assembly.memory, assembly.engine.runner.device.type
        here = plan.weights + plan.drafter if device == "cpu" else 0
        memory = process_memory(ours)
        program = max(0, memory.now - here)  # mapped weights are in memory, too: they were read when they were checked
        step = step_bytes(assembly, config)
        sizes = (plan.weights, plan.drafter, plan.cache, plan.pages, step, program)
        return cls(*sizes, memory.peak, memory.now, memory.files, device)

    @property
    def total(self) -> int:
        """The most that is taken where the model runs, the process itself included where that is the same memory."""
        model = self.weights + self.drafter + self.cache + self.activations
        return max(model + self.process, self.peak) if self.device == "cpu" else model

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "drafter": self.drafter,
            f"cache of {self.pages} pages": self.cache,
            "a step": self.activations,
        }
        if self.device == "cpu":
            parts["the program"] = self.process
        told = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        now = f"; resident now {_gib(self.now)}, {_gib(self.files)} of it pages of files" if self.now else ""
        return f"at most {_gib(self.total)}: {told}{now}"


def step_bytes(assembly: Assembly, config: EngineConfig) -> int:
    """Of a layer for all rows a step may have, of its keys and values laid end to end, and of every text's logits."""
    model = assembly.engine.runner.model
    shape = model.config
    row = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.ffn + 4 * shape.width
    floats = config.max_num_batched_tokens * row + COPIES * config.max_num_seqs * shape.vocab
    return floats * 4 + assembly.memory.cache // shape.layers


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of memory a process has now, the most it had, and how much of the former are pages of files."""

    now: int = 0
    peak: int = 0
    files: int = 0


def process_memory(ours: Path = OURS) -> ProcessMemory:
    """What the system says of this process; zeros where it does not tell."""
    try:
        text = (ours / "status").read_text()
    except OSError:
        return ProcessMemory()
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(VmRSS|VmHWM|RssFile):\s+(\d+) kB", text, re.M)}
    return ProcessMemory(*(sizes.get(name, 0) for name in ("VmRSS", "VmHWM", "RssFile")))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
