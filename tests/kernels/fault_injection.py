"""A build of the native library whose allocations fail on demand."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foretell.kernels.native import library as module
from foretell.kernels.native.build import EXTRA_FLAGS_VARIABLE, build_library
from foretell.kernels.native.library import Library

FLAGS = "-O1 -DFORETELL_FAULTS -Wl,-Bsymbolic"


class FaultyLibrary(Library):
    """The library with the hooks of `fault_injection.cpp`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.hooks = ctypes.CDLL(path)
        self.hooks.foretell_fail_allocation.argtypes = (ctypes.c_int64,)
        self.hooks.foretell_fail_allocation.restype = None
        self.hooks.foretell_failure_pending.restype = ctypes.c_bool
        self.hooks.foretell_fail_in_workers.restype = ctypes.c_int64

    def fail_allocation(self, count: int) -> None:
        """Free all scratch memory, then let the allocation after `count` others fail; below 0 none."""
        self.hooks.foretell_fail_allocation(count)

    @property
    def pending(self) -> bool:
        """Return whether the planted failure is still to come."""
        return bool(self.hooks.foretell_failure_pending())


@contextmanager
def faulty_library() -> Iterator[FaultyLibrary]:
    """Compile this build, once for each machine's cache, and let all of foretell use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXTRA_FLAGS_VARIABLE, FLAGS)
        faulty = FaultyLibrary(str(build_library()))
        usual = module.library
        for name, each in [*sys.modules.items()]:
            if name.startswith("foretell.") and getattr(each, "library", None) is usual:
                patch.setattr(each, "library", lambda: faulty)
        yield faulty
        faulty.fail_allocation(-1)
