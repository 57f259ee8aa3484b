# mypy: ignore-errors
"""How much of a program's memory a device has: what is on its way at once has to fit."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.runtime import driver


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
