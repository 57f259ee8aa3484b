"""Operating-system helpers: the cache folder, file locks, memory, CPU cores and OpenMP settings."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import math
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

NO_QUOTA = 1 << 16  # cores


def home() -> Path:
    """Return the cache folder: FORETELL_HOME, or `foretell` in the user's cache folder."""
    if own := os.environ.get("FORETELL_HOME"):
        return Path(os.path.expanduser(own)).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)).absolute() / "foretell"


@contextlib.contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on a folder; call `on_wait` before waiting for another holder.

    The system frees it when the process dies. The lock is on a file opened for writing, because NFS refuses an
    exclusive lock on a folder.
    """
    with (folder / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def trim_memory() -> None:
    """Return freed memory to the system; after a load the C library would keep a few hundred megabytes."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Run the block without cyclic garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while many long-lived objects are created, and exclude them from later collections.

    Scanning them would take a fifth of the time, now and in every later collection.
    """
    with without_gc():
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # so that all objects are destroyed at exit; otherwise libraries report leaks


def cpu_name() -> str:
    """Return the model name of the CPU, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def usable_cores(system: Path = Path("/sys")) -> int:
    """Return the physical cores this process may use: hyper-threads count once, cgroup quotas apply."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(system, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(system)))


def _siblings(system: Path, cpu: int) -> str:
    try:
        return (system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(system: Path) -> int:
    """Return the CPU quota of the cgroup in cores; a fraction of a core counts as one."""
    try:
        limit, period = (system / "fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):  # none, or "max"
        return NO_QUOTA


SPIN_COUNT = "5000"  # iterations; about as long as the gap between two matrix products of a step


def limit_openmp_spinning() -> None:
    """Limit how long idle OpenMP threads spin. GNU OpenMP reads this when torch is imported, so it must be set before.

    This guards against a rare case: next to another process a step has taken 0.3 to 1.2 s instead of 33 ms, longer the
    longer idle threads spin. Alone it costs nothing; next to a busy loop a step takes a third longer (docs/log/).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
