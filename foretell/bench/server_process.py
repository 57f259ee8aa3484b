"""A `foretell serve` process for load tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from foretell.errors import ForetellError

COMMAND = (sys.executable, "-m", "foretell", "serve")
URL = re.compile(r"http://\S+:\d+")
STOP_SECONDS = 60.0  # to finish running requests


class ServerProcess(NamedTuple):
    """URL and process id of a server."""

    url: str
    pid: int


@contextmanager
def start_server(settings: Mapping[str, Any]) -> Iterator[ServerProcess]:
    """Start `foretell serve` on a free local port and stop it at the end of the context."""
    command = [*COMMAND, "--port", "0", *flags(settings)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield ServerProcess(_address(process, log), process.pid)
        finally:
            _stop(process)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line flags."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found.append(f"--{flag}={value}")
    return found


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    found = URL.search(process.stdout.readline())
    if found is None:
        process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or ["no output"]
        raise ForetellError(f"the server did not start: {lines[-1].removeprefix('foretell: ')}")
    return found[0]


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
