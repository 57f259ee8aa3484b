"""The servers that run on this machine: each holds a locked file in the cache folder, which `foretell ps` reads."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from foretell.utils.system import home


@dataclass(frozen=True)
class RunningServer:
    """A server process and what it serves."""

    url: str
    model: str
    drafters: tuple[str, ...]
    pid: int
    started: float  # seconds since the epoch


def registry_folder() -> Path:
    """Return the folder with a file for each running server."""
    return home() / "servers"


@contextlib.contextmanager
def registered(url: str, model: str, drafters: tuple[str, ...]) -> Iterator[None]:
    """List this process as a running server. A cache folder that cannot be written leaves it unlisted."""
    server = RunningServer(url, model, drafters, os.getpid(), time.time())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = registry_folder()
            folder.mkdir(parents=True, exist_ok=True)
            # Containers that share the folder have equal PIDs, so the name is random. The suffix by which a file is
            # listed comes last, once it is complete and locked.
            handle, name = tempfile.mkstemp(prefix=f"{server.pid}-", suffix=".new", dir=folder)
            file = stack.enter_context(os.fdopen(handle, "w", encoding="utf-8"))
            new, path = Path(name), Path(name).with_suffix(".json")
            stack.callback(new.unlink, missing_ok=True)
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when the process dies
            file.write(json.dumps(asdict(server)))
            file.flush()
            new.rename(path)
        yield


def running_servers() -> list[RunningServer]:
    """Return the running servers, oldest first; remove the files of those that have died."""
    found = [server for path in registry_folder().glob("*.json") if (server := _read(path)) is not None]
    return sorted(found, key=lambda server: server.started)


def _read(path: Path) -> RunningServer | None:
    try:
        with path.open(encoding="utf-8") as file:
            if _is_unlocked(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            values = json.load(file)
        return RunningServer(**values | {"drafters": tuple(values["drafters"])})
    except (OSError, ValueError, TypeError, KeyError):  # it ends just now, or another version wrote it
        return None


def _is_unlocked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
