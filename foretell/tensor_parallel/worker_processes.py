"""Worker processes of a tensor-parallel group: start, watch and stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Literal

from foretell.errors import RankError

PACKAGE_ROOT = str(Path(__file__).parents[2])
EXIT_TIMEOUT = 5.0  # seconds a process has to exit by itself
FAILURE_WINDOW = 0.5  # seconds after a failure in which other ranks may report theirs, one of which may be the cause


@dataclass(frozen=True)
class WorkerReport:
    """Report of a worker: it has started, it is ready, or why it fails."""

    kind: Literal["started", "ready", "failed"]
    error: str = ""
    is_secondary: bool = False  # it fails only because another rank did
    weights: int = 0  # bytes, heads included
    heads: int = 0  # bytes


class WorkerProcesses:
    """The processes of ranks 1 and up. When one ends, all are stopped, and `failure` says why."""

    def __init__(self, size: int, threads: int) -> None:
        self.size = size
        self.failure: RankError | None = None
        self.reports: dict[int, list[WorkerReport]] = {rank: [] for rank in range(1, size)}
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[RankError], None]] = []
        self._closing = False
        for rank in range(1, size):
            self._connections[rank], self._processes[rank] = _start(threads)
        self._watch = threading.Thread(target=self._run, name="foretell-ranks", daemon=True)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def send(self, rank: int, message: object) -> None:
        """Send an object, pickled, to one rank."""
        self._send(rank, lambda connection: connection.send(message))

    def broadcast(self, message: bytes) -> None:
        """Send bytes to all ranks."""
        for rank in self._connections:
            self._send(rank, lambda connection: connection.send_bytes(message))

    def wait_for(self, kind: str) -> list[WorkerReport]:
        """Wait until every rank has sent this report; raise if one has failed."""

        def found() -> list[WorkerReport]:
            return [report for reports in self.reports.values() for report in reports if report.kind == kind]

        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(found()) == self.size - 1)
        if self.failure is not None:
            raise self.failure
        return found()

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """Call `callback` once, from another thread, if a rank is lost."""
        with self._changed:
            self._callbacks.append(callback)

    def fail(self, error: BaseException) -> RankError:
        """Stop all ranks after a failed step of the leader; return the error with its cause."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, 4 * FAILURE_WINDOW)
        return self._fail(f"a step failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop all processes and wait for them."""
        self._closing = True
        for connection in self._connections.values():
            _shut_down(connection)
        self._watch.join()
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, rank: int, send: Callable[[Connection], None]) -> None:
        try:
            send(self._connections[rank])
        except OSError as error:
            raise self.fail(error) from error

    def _run(self) -> None:
        """Receive reports until a process ends."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while not self._closing:
            try:
                for connection in wait(list(ranks)):
                    assert isinstance(connection, Connection), "only connections are waited for"
                    self._receive(ranks[connection], connection)
            except (EOFError, OSError):
                if not self._closing:
                    self._fail(self._cause())
                return

    def _receive(self, rank: int, connection: Connection) -> None:
        report: WorkerReport = connection.recv()
        with self._changed:
            self.reports[rank].append(report)
            self._changed.notify_all()

    def _cause(self) -> str:
        """Describe the rank that ended first: one that was killed, else one with an error of its own."""
        time.sleep(FAILURE_WINDOW)
        self._receive_rest()
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and code < 0:
                return f"rank {rank} of {self.size} was killed by {signal.Signals(-code).name}"
        failures = sorted(
            (report.is_secondary, rank, report.error)
            for rank, reports in self.reports.items()
            for report in reports
            if report.error
        )
        for _, rank, message in failures:
            return f"rank {rank} of {self.size} failed: {message}"
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        rank, code = next(((rank, code) for rank, code in codes.items() if code is not None), (1, None))
        return f"rank {rank} of {self.size} ended with exit code {code}"

    def _receive_rest(self) -> None:
        """Receive the reports that ended processes left in their connections."""
        for rank, connection in self._connections.items():
            try:
                while connection.poll():
                    self._receive(rank, connection)
            except (EOFError, OSError):
                continue

    def _fail(self, message: str) -> RankError:
        with self._changed:
            if self.failure is not None:
                return self.failure
            self.failure = RankError(f"{message}; the model needs all of its ranks: restart it")
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        for callback in callbacks:
            callback(self.failure)
        return self.failure


def _start(threads: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a worker; return its connection and process.

    It is a separate program, so that the caller's script does not run a second time.
    """
    ours, theirs = Pipe()
    with theirs:
        env = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": _python_path()}
        process = subprocess.Popen(
            [sys.executable, "-m", "foretell.tensor_parallel.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | env,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # Ctrl-C of a terminal goes to the leader only, also during start-up
        )
    return ours, process


def _shut_down(connection: Connection) -> None:
    """Shut a connection down. Closing it would take effect only when no thread waits on it any more."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _python_path() -> str:
    """Return a PYTHONPATH by which the worker finds this package."""
    return os.pathsep.join([PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
