"""How long an idle thread spins before it sleeps."""

from __future__ import annotations

import os

SPINS = "5000"  # about as long as the gap between two products of a step; see docs/log/


def let_idle_threads_sleep() -> None:
    """Tell GNU OpenMP to spin briefly. It reads this when torch is loaded, so it must be said before.

    A guard against a rare, bad case: beside another process a step has been seen to take 0.3 to 1.2 s instead of 33 ms,
    longer the longer idle threads spin. It costs nothing alone, and a third beside a plain busy loop; see docs/log/.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
