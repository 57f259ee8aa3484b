"""What the system lends: a folder for what is kept between runs, locks, memory that it can have back, and cores."""

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

MANY = 1 << 16  # cores


def home() -> Path:
    """The cache folder: FORETELL_HOME, or `foretell` in the user's cache folder."""
    if own := os.environ.get("FORETELL_HOME"):
        return Path(os.path.expanduser(own)).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)).absolute() / "foretell"


@contextlib.contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the folder's lock, which the system frees when a process dies; call `on_wait` where another holds it.

    It is on a file opened for writing, because NFS refuses an exclusive lock on a folder.
    """
    with (folder / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def trim_memory() -> None:
    """Let the system have what was freed; after a load the C library would keep a few hundred megabytes of it."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """While much is made that stays: to look for garbage in it would take a fifth of the time, now and ever after."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end all is let go, as ever: else libraries complain of leaks
    finally:
        if was_on:
            gc.enable()


def cpu_name() -> str:
    """The name of the CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def usable_cores(system: Path = Path("/sys")) -> int:
    """Physical cores this process may use: two threads of one core are one, and a container may have a part of them."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(system, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(system)))


def _siblings(system: Path, cpu: int) -> str:
    try:
        return (system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(system: Path) -> int:
    """What a control group lets it have, in whole cores; a part of one is one."""
    try:
        limit, period = (system / "fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):  # none, or "max"
        return MANY


SPINS = "5000"  # about as long as the gap between two products of a step; see docs/log/


def limit_openmp_spinning() -> None:
    """Tell GNU OpenMP to spin briefly. It reads this when torch is loaded, so it must be said before.

    A guard against a rare, bad case: beside another process a step has been seen to take 0.3 to 1.2 s instead of 33 ms,
    longer the longer idle threads spin. It costs nothing alone, and a third beside a plain busy loop; see docs/log/.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
