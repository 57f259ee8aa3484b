"""The peak memory of a server and its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretell.build.engine_builder import Assembly
    from foretell.config import EngineConfig

GIB = 1 << 30
PROC_SELF = Path("/proc/self")
# Bytes per logit, in floats, while sampling: probabilities, 64-bit noise, and what the C allocator retains. Measured
# with 64 sequences and a vocabulary of 49152.
LOGIT_COPIES = 26


@dataclass(frozen=True)
class MemoryReport:
    """Memory by use, in bytes. KV pages take memory when first written to; eventually all of them have been."""

    weights: int
    drafter: int
    cache: int
    pages: int
    activations: int  # of the largest step: its rows and the logits of every sequence
    process: int  # of the process besides the model: Python, torch, the tokenizer, growth of the draft corpus
    peak: int = 0  # peak resident memory so far, while the model was loaded
    now: int = 0  # resident memory after loading
    files: int = 0  # part of `now` that is file-backed: libraries and mapped weights, shareable between processes
    device: str = "cpu"

    @classmethod
    def measure(cls, assembly: Assembly, config: EngineConfig, proc: Path = PROC_SELF) -> MemoryReport:
        """Measure after loading and before the first request."""
        plan, device = assembly.memory, assembly.engine.runner.device.type
        in_process = plan.weights + plan.drafter if device == "cpu" else 0
        memory = process_memory(proc)  # mapped weights are resident too: loading has checked them
        return cls(
            weights=plan.weights,
            drafter=plan.drafter,
            cache=plan.cache,
            pages=plan.pages,
            activations=activation_bytes(assembly, config),
            process=max(0, memory.now - in_process) + (0 if assembly.corpus is None else assembly.corpus.max_growth),
            peak=memory.peak,
            now=memory.now,
            files=memory.files,
            device=device,
        )

    @property
    def total(self) -> int:
        """Return the peak on the model's device; on a CPU the process itself is included."""
        model = self.weights + self.drafter + self.cache + self.activations
        return max(model + self.process, self.peak) if self.device == "cpu" else model

    def parts(self) -> dict[str, int]:
        """Return the parts of `total` in bytes by name."""
        parts = {
            "weights": self.weights,
            "drafter": self.drafter,
            f"KV cache of {self.pages} pages": self.cache,
            "activations": self.activations,
        }
        return parts | ({"process": self.process} if self.device == "cpu" else {})

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {_gib(size)}" for name, size in self.parts().items() if size)
        now = f"; resident now {_gib(self.now)}, {_gib(self.files)} of it file-backed" if self.now else ""
        return f"at most {_gib(self.total)}: {sizes}{now}"


def activation_bytes(assembly: Assembly, config: EngineConfig) -> int:
    """Return the memory of the largest step: one layer's activations, its gathered KV, and the logits."""
    model = assembly.engine.runner.model
    shape = model.config
    row = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.ffn + 4 * shape.width
    floats = config.max_num_batched_tokens * row + LOGIT_COPIES * config.max_num_seqs * shape.vocab
    return floats * 4 + assembly.memory.cache // shape.layers


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of a process in bytes: now, its peak, and the file-backed part of `now`."""

    now: int = 0
    peak: int = 0
    files: int = 0


def process_memory(proc: Path = PROC_SELF) -> ProcessMemory:
    """Return a process's memory from /proc; zeros where the system has none."""
    try:
        text = (proc / "status").read_text()
    except OSError:
        return ProcessMemory()
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(VmRSS|VmHWM|RssFile):\s+(\d+) kB", text, re.M)}
    return ProcessMemory(now=sizes.get("VmRSS", 0), peak=sizes.get("VmHWM", 0), files=sizes.get("RssFile", 0))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
