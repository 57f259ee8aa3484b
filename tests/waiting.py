"""Waiting for what comes about by itself: soon where the machine is free, and late where it is not."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60  # seconds, many times what anything here takes on a busy machine


def wait_for(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Until it holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.002)
