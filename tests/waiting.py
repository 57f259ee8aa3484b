"""Waiting for a condition that becomes true by itself, on a free or on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT = 60  # seconds; many times what anything here takes on a busy machine


def wait_for(holds: Callable[[], object], seconds: float = TIMEOUT) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "the condition never became true"
        time.sleep(0.002)
