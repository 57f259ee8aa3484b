# mypy: ignore-errors
"""How much of a program's memory a device has: what is on its way at once and what is added up have to fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.runtime import driver

FEWEST_ROWS = 16  # that a product takes
MOST_ROWS, MOST_NUMBERS = 128, 16384  # of a program in 16 bits: rows, and numbers that it adds up to


@dataclass(frozen=True)
class Cut:
    """How rows are cut for attention, so that what is added up stays in registers: what does not fit there lies in
    memory that the driver takes for every thread a device could run at once, gigabytes of it."""

    rows: int  # of a program
    pieces: int  # programs
    warps: int

    @classmethod
    def of(cls, rows: int, padded: int, exact: bool) -> Cut:
        """Rows of `padded` numbers each. `exact`: in float32, without tensor cores. There a program has always as many
        rows, for the order in which it adds up hangs on how many there are."""
        each = FEWEST_ROWS
        if not exact:
            each = max(each, min(triton.next_power_of_2(rows), MOST_ROWS, MOST_NUMBERS // padded))
        return cls(each, -(-rows // each), 8 if exact else 4)


@lru_cache
def shared_bytes(device: torch.device) -> int | None:
    """What a program may have at most; None where nothing bounds it."""
    if device.type != "cuda":
        return None
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def stages_that_fit(wanted: int, each: int, device: torch.device) -> int:
    """Of so many stages of a loop, each with so many bytes, those there is room for; the result does not hang on it."""
    room = shared_bytes(device)
    return wanted if room is None else max(1, min(wanted, room // each))
