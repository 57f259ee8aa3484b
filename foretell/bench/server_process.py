"""A server of our own to be loaded, in a process of its own."""

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
LISTENS = re.compile(r"http://\S+:\d+")
STOPPING = 60.0  # seconds it gets to let texts finish


class OwnServer(NamedTuple):
    """Where it listens, and which process it is."""

    url: str
    pid: int


@contextmanager
def own_server(settings: Mapping[str, Any]) -> Iterator[OwnServer]:
    """`foretell serve` on a free port of this machine. It stops when the caller is done."""
    words = [*COMMAND, "--port", "0", *flags(settings)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield OwnServer(_address(process, log), process.pid)
        finally:
            _stop(process)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as they are typed."""
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
    found = LISTENS.search(process.stdout.readline())
    if found is None:
        process.wait()
        log.seek(0)
        said = log.read().strip().splitlines() or ["it said nothing"]
        raise ForetellError(f"the server did not start: {said[-1].removeprefix('foretell: ')}")
    return found[0]


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
