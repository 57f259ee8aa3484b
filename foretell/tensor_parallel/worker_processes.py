"""The processes of the other ranks: started, watched, ended."""

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
EXIT_TIMEOUT = 5.0  # seconds a process has to end by itself
FAILURE_WINDOW = 0.5  # seconds after one rank's failure in which the others' show, of which one may be the cause


@dataclass(frozen=True)
class WorkerReport:
    """What a process tells: that it is there, that it can run, or why it ends."""

    kind: Literal["here", "ready", "failed"]
    error: str = ""
    is_secondary: bool = False  # whether it ends only because another did
    weights: int = 0  # bytes it holds, heads included
    heads: int = 0  # bytes of heads it holds


class WorkerProcesses:
    """Ranks 1 to the last. When one ends all are ended, and `failure` says why."""

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
        """Their ids."""
        return [process.pid for process in self._processes.values()]

    def send(self, rank: int, message: object) -> None:
        """Send anything that can be pickled."""
        self._send(rank, lambda line: line.send(message))

    def broadcast(self, message: bytes) -> None:
        """Send bytes to every rank."""
        for rank in self._connections:
            self._send(rank, lambda line: line.send_bytes(message))

    def wait_for(self, kind: str) -> list[WorkerReport]:
        """Wait until every rank has reported this, or one has failed."""

        def found() -> list[WorkerReport]:
            return [report for reports in self.reports.values() for report in reports if report.kind == kind]

        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(found()) == self.size - 1)
        if self.failure is not None:
            raise self.failure
        return found()

    def on_failure(self, told: Callable[[RankError], None]) -> None:
        """Have `flush` called once, from another thread, should a rank be lost."""
        with self._changed:
            self._callbacks.append(told)

    def fail(self, error: BaseException) -> RankError:
        """Why a step of the first rank broke off, once that is known; all ranks end."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, 4 * FAILURE_WINDOW)
        return self._fail(f"a step broke off: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End all processes, and wait until they have."""
        self._closing = True
        for line in self._connections.values():
            _shut_down(line)
        self._watch.join()
        for line in self._connections.values():
            line.close()
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
        """Hear reports until a process ends."""
        ranks = {line: rank for rank, line in self._connections.items()}
        while not self._closing:
            try:
                for line in wait(list(ranks)):
                    assert isinstance(line, Connection), "nothing else is waited for"
                    self._receive(ranks[line], line)
            except (EOFError, OSError):
                if not self._closing:
                    self._fail(self._cause())
                return

    def _receive(self, rank: int, line: Connection) -> None:
        report: WorkerReport = line.recv()
        with self._changed:
            self.reports[rank].append(report)
            self._changed.notify_all()

    def _cause(self) -> str:
        """Which rank ended first, as far as can be seen: one that was killed, else one with an error of its own."""
        time.sleep(FAILURE_WINDOW)
        self._receive_rest()
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and code < 0:
                return f"rank {rank} of {self.size} was ended by {signal.Signals(-code).name}"
        failed = [(report.is_secondary, rank, report.error) for rank, said in self.reports.items() for report in said]
        for _, rank, words in sorted(each for each in failed if each[2]):
            return f"rank {rank} of {self.size} failed: {words}"
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        rank, code = next(((rank, code) for rank, code in codes.items() if code is not None), (1, None))
        return f"rank {rank} of {self.size} ended with exit code {code}"

    def _receive_rest(self) -> None:
        """Take in what ended processes left to be read."""
        for rank, line in self._connections.items():
            try:
                while line.poll():
                    self._receive(rank, line)
            except (EOFError, OSError):
                continue

    def _fail(self, words: str) -> RankError:
        with self._changed:
            if self.failure is not None:
                return self.failure
            self.failure = RankError(f"{words}; the model needs all of its ranks: start it again")
            listeners = list(self._callbacks)
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        for told in listeners:
            told(self.failure)
        return self.failure


def _start(threads: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process, and the line to it. It is a program of its own, so that a caller's script is not run a second time."""
    ours, theirs = Pipe()
    with theirs:
        given = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": _python_path()}
        process = subprocess.Popen(
            [sys.executable, "-m", "foretell.tensor_parallel.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | given,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # Ctrl-C of a terminal is the first rank's alone, while the others start, too
        )
    return ours, process


def _shut_down(line: Connection) -> None:
    """Say that nothing more will come; to close it would say so only when nobody waits for it any more."""
    with socket.socket(fileno=os.dup(line.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _python_path() -> str:
    """The package must be found there as it was here."""
    return os.pathsep.join([PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
