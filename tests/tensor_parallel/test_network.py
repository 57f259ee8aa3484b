"""Ranks accept connections from this machine alone, and only this user can open their rendezvous store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from foretell.tensor_parallel.collectives import join_store, open_store
from tests.tensor_parallel.sharding import write_folder
from tests.tensor_parallel.test_lost_ranks import PROGRAM
from tests.tiny import tiny_decoder

LISTENING = "0A"  # a TCP state, as /proc/net/tcp has it
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")  # 127.0.0.1, ::1, and it mapped


def listeners(process: int) -> Iterator[str]:
    """Yield the local address of each socket on which a process listens."""
    sockets = set[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that was closed since, such as the listing itself
            sockets.add(os.readlink(file))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].split(":")[0]


def test_every_listener_is_on_loopback(tmp_path: Path) -> None:
    folder = write_folder(tiny_decoder(), tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdin is not None
        other = int(first.stdout.readline())
        found = [*listeners(first.pid), *listeners(other)]
        first.stdin.close()
    assert found, "Gloo listens for its peers"
    assert set(found) <= set(LOOPBACK)


def test_only_this_user_opens_the_store() -> None:
    before = set(listeners(os.getpid()))
    store, path = open_store(5.0)
    assert set(listeners(os.getpid())) == before, "the store has no port"
    assert os.stat(path).st_mode & 0o077 == 0 and os.stat(Path(path).parent).st_mode & 0o077 == 0
    store.set("key", "value")
    assert join_store(path, 5.0).get("key") == b"value"
