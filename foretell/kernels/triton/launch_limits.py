# mypy: ignore-errors
"""Tilings of the kernels, and the limits of a device that bound them: shared memory and registers of a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.runtime import driver

MIN_DOT_ROWS = 16  # fewest rows of a `tl.dot`
MAX_TILE_ROWS = 128  # rows of an attention program in 16 bits
MAX_ACCUMULATORS = 16384  # float32 accumulators of an attention program in 16 bits
TARGET_PROGRAMS = 192  # programs that saturate the memory bandwidth of an H200 where the inputs can be split
NUM_SMS = 132  # streaming multiprocessors of an H200
FEW_ROWS = 64  # rows up to which a matrix product is bound by reading its weights
FLOAT_SPLIT_UNIT = 128  # with 16-bit weights a split of the inputs is a multiple of this many
QUANT_SPLIT_UNIT = 256  # the same with int8 and fp8 weights


@dataclass(frozen=True)
class AttentionTiling:
    """The division of the rows of an attention tile among programs so that accumulators stay in registers.

    Accumulators that spill go to local memory, which the driver reserves for every thread the device could run at
    once: gigabytes.
    """

    rows: int  # per program
    pieces: int  # programs per tile
    warps: int

    @classmethod
    def of(cls, rows: int, padded: int, exact: bool) -> AttentionTiling:
        """Return the tiling of `rows` rows with a padded head dimension of `padded`.

        `exact` is float32 without tensor cores. Its programs always have the same number of rows, because the order of
        additions depends on it.
        """
        each = MIN_DOT_ROWS
        if not exact:
            each = max(each, min(triton.next_power_of_2(rows), MAX_TILE_ROWS, MAX_ACCUMULATORS // padded))
        return cls(each, -(-rows // each), 8 if exact else 4)


@dataclass(frozen=True)
class GemmTiling:
    """Tile sizes of a matrix product with few rows: every program multiplies all rows by a block of weights."""

    outputs: int  # outputs per program
    inputs: int  # inputs per loop iteration
    splits: int  # parts that the inputs are split into (split-K)
    warps: int
    stages: int

    @classmethod
    def for_float(cls, outputs: int, inputs: int, rows: int, split: bool) -> GemmTiling:
        """Return the tiling for 16-bit weights, as measured on an H200.

        The split of the inputs must not depend on `rows`, because the order of additions in a row depends on it.
        """
        block, splits = _split_inputs(outputs, inputs, FLOAT_SPLIT_UNIT, split)
        programs = -(-outputs // block)
        if programs * splits <= NUM_SMS and rows <= FEW_ROWS:
            return cls(block, 128, splits, 4, 6)
        if splits > 1 and block == 64 and rows <= FEW_ROWS:
            return cls(block, 128, splits, 4, 3)
        if rows <= 32:
            return cls(block, 64, splits, 4, 4 if block == 64 else 6)
        if rows <= FEW_ROWS:
            tall = programs >= 4 * NUM_SMS and block == 64
            return cls(128, 64, splits, 8, 6) if tall else cls(block, 64, splits, 4, 4)
        if rows <= 128:
            return cls(block, 64, splits, 4, 4)
        return cls(max(block, 128) if block == 64 else block, 64, splits, 8 if block == 64 else 4, 4)

    @classmethod
    def for_8bit(cls, outputs: int, inputs: int, rows: int, split: bool) -> GemmTiling:
        """Return the tiling for int8 and fp8 weights, as measured on an H200.

        Integer sums are exact, but in fp8 a row depends on the split, which therefore must not depend on `rows`.
        """
        block, splits = _split_inputs(outputs, inputs, QUANT_SPLIT_UNIT, split)
        if split:
            return cls(block, 256, splits, 4, 3) if inputs >= 8192 else cls(block, 128, splits, 4, 4)
        if -(-outputs // block) <= NUM_SMS:
            return cls(block, 256, splits, 4, 5)
        return cls(block, 256, splits, 4, 3) if rows <= 32 else cls(block, 128, splits, 4, 4)


def _split_inputs(outputs: int, inputs: int, unit: int, split: bool) -> tuple[int, int]:
    """Return the outputs per program and, if `split`, the number of input splits that fill the device; else 1."""
    block = 64 if outputs >= 3584 else 32 if outputs >= 2048 else 16
    programs, splits = -(-outputs // block), 1
    while split and programs * splits < TARGET_PROGRAMS and inputs >= 4 * splits * unit:
        splits *= 2
    return block, splits


@lru_cache
def max_shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a program may use; None where there is no limit."""
    if device.type != "cuda":
        return None
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def fit_stages(wanted: int, stage_bytes: int, device: torch.device) -> int:
    """Return how many of `wanted` pipeline stages fit into shared memory. No result depends on it."""
    limit = max_shared_memory(device)
    return wanted if limit is None else max(1, min(wanted, limit // stage_bytes))
