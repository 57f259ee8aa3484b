"""How long an idle thread spins before it sleeps."""

from __future__ import annotations

import os

SPINS = "5000"  # about as long as the gap between two products of a step; see docs/log.md


def let_idle_threads_sleep() -> None:
    """Tell GNU OpenMP to spin briefly. It reads this when torch is loaded, so it must be said before.

    By default an idle thread spins for milliseconds. Where another process has taken a core, the threads then spin
    against each other: a decode step went from 33 ms to 1.2 s, with this to 0.09 s, and it costs nothing when alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
