"""What attention's kernels keep outside of registers on a CUDA device of a kind, compiled here, without one:
python bench/registers.py [--few]. The driver takes that memory for every thread that the device could run at once."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from foretell.kernels.triton.attention import attend
from foretell.kernels.triton.draft_attention import DraftLevel, LayerKV, draft_attention
from foretell.kernels.triton.row_tables import NO_SPLIT, RowTables, StepShape
from foretell.runner.cuda.graph_shapes import CAPTURE_DEPTHS, LARGE_TILE, PREFILL_TILE, SMALL_TILE

H100_OR_H200 = GPUTarget("cuda", 90, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DIMS = (64, 128, 256)
ROWS, PAGE, PAGES, KV_HEADS = 8, 16, 64, 2
MANY = 256  # tiles, enough for a program to have four parts, or all where there are few
FEW, MORE = 16, 24  # parts
WIDEST = 10  # branches of a level of a head's tree


class NoDevice:
    """Stands for one of a kind, for which kernels can be compiled and not run."""

    def get_current_target(self) -> GPUTarget:
        return H100_OR_H200

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Case:
    """A launch: of a step's attention by its sizes, or of a head's that follows so many branches."""

    dtype: str
    dim: int
    sizes: StepShape | None = None
    branches: int = 0
    share: int = 4  # query heads to a key head

    def launch(self) -> None:
        q = torch.empty(ROWS, KV_HEADS * self.share, self.dim, dtype=DTYPES[self.dtype])
        keys, values = torch.empty(2, PAGES, PAGE, KV_HEADS, self.dim, dtype=q.dtype)
        pages = torch.zeros(ROWS, PAGES, dtype=torch.int32)
        if self.sizes is not None:
            numbers = torch.zeros(self.sizes.table_size, dtype=torch.int32)
            attend(q, keys, values, RowTables.over(numbers, self.sizes, pages), 0.1, None)
        else:
            self._draft_attention(LayerKV(keys, values), pages)

    def _draft_attention(self, layer: LayerKV, pages: Tensor) -> None:
        n, draft_tokens = 2 * self.branches, 8 * self.branches
        q = torch.empty(n, KV_HEADS * self.share, self.dim, dtype=layer.keys.dtype)
        own = LayerKV(*torch.empty(2, 2, draft_tokens, KV_HEADS, self.dim, dtype=q.dtype))
        masks = torch.ones(n, draft_tokens, dtype=torch.int8) if self.branches > 1 else None
        positions = torch.zeros(2, dtype=torch.int64)
        draft_attention(
            q,
            layer,
            own,
            DraftLevel(positions, pages, PAGES * PAGE, self.branches, 1, 1, self.branches, masks),
            0.1,
            None,
        )

    def __str__(self) -> str:
        if self.sizes is None:
            return f"{self.dtype} {self.dim}: a head, {self.branches} branches of {self.share}"
        kind = "prompts" if self.sizes.splits == NO_SPLIT else "decode" if self.sizes.tiles < MANY else "large batches"
        kind = f"{kind} of few keys" if 0 < self.sizes.splits <= FEW else kind
        trees = ", trees" if self.sizes.path_length else ""
        return f"{self.dtype} {self.dim}: {kind}, {self.sizes.tile_height} rows{trees}"


@dataclass(frozen=True)
class Use:
    kernel: str
    registers: int
    stack: int  # bytes of a thread


def every_case() -> Iterator[Case]:
    for dtype in DTYPES:
        for dim in DIMS:
            for height in (SMALL_TILE, LARGE_TILE):
                yield Case(dtype, dim, StepShape(ROWS, MANY, height, MORE))
                yield Case(dtype, dim, StepShape(ROWS, MANY, height, FEW))
                yield Case(dtype, dim, StepShape(ROWS, 1, height, FEW))
            for height, splits in ((SMALL_TILE, MORE), (LARGE_TILE, MORE), (PREFILL_TILE, NO_SPLIT)):
                for deep in (0, CAPTURE_DEPTHS[0]):
                    yield Case(dtype, dim, StepShape(ROWS, ROWS, height, splits, deep, ROWS if deep else 0))
            for branches, share in ((1, 4), (WIDEST, 4), (WIDEST, 8), (WIDEST, 16)):
                yield Case(dtype, dim, None, branches, share)


def few_cases() -> list[Case]:
    """Those that need the most."""
    prompt, tree = (
        StepShape(ROWS, ROWS, PREFILL_TILE, NO_SPLIT),
        StepShape(ROWS, ROWS, LARGE_TILE, MORE, CAPTURE_DEPTHS[0], ROWS),
    )
    floats = [Case("float32", 64, prompt), Case("float32", 256, tree), Case("float32", 256, None, WIDEST, 4)]
    halves = [Case("bfloat16", 256, None, WIDEST, 16), Case("bfloat16", 256, StepShape(ROWS, ROWS, LARGE_TILE, MORE))]
    return [
        *floats,
        *halves,
        *(Case("bfloat16", 128, StepShape(ROWS, MANY, LARGE_TILE, splits)) for splits in (MORE, FEW)),
    ]


def compiled(case: Case) -> list[Use]:
    """What each kernel of a launch needs."""
    run, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        case.launch()
    finally:
        JITFunction.run = run
    return [use_of(kernel.metadata.name, kernel.asm["cubin"]) for kernel in found]


def use_of(name: str, binary: bytes) -> Use:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"\b{field}:(\d+)", text)[0]) for field in ("REG", "STACK"))
    return Use(name, registers, stack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="only those that need the most")
    driver.set_active(NoDevice())
    rows = []
    for case in few_cases() if parser.parse_args().few else every_case():
        for use in compiled(case):
            print(f"{case!s:50} {use.kernel:12} {use.registers:4} registers {use.stack:6} bytes of stack", flush=True)
            rows.append({"case": str(case), **asdict(use)})
    print(json.dumps({"triton": triton.__version__, "stack": max(row["stack"] for row in rows), "kernels": rows}))


if __name__ == "__main__":
    main()
