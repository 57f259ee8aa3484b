"""Engines that are measured in processes of their own: a line of JSON each way.

A child loads its engine, says so, and sleeps until it is asked; what it prints besides goes to its log.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol

ENDING = 5.0  # seconds, the most that is waited for what a child said last
LAST_LINES = 12  # of a log, shown of a child that ended


@dataclass(frozen=True)
class Job:
    """Prompts to generate from, `batch` at a time."""

    prompts: list[list[int]]
    batch: int
    tokens: int
    temperature: float = 0.0
    way: str = "plain"


@dataclass(frozen=True)
class Written:
    """Outputs of a batch: their tokens, and the seconds from the first token of each to its last."""

    outputs: list[list[int]]
    decoding: float
    accepted: int  # accepted draft tokens


@dataclass
class Taken:
    """What a job took: seconds of each batch from asking to the last token, prompts included."""

    each: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    decoding: float = 0.0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.each)

    @property
    def per_step(self) -> float:
        """Tokens a step gives a text, the target's own included."""
        return self.tokens / (self.tokens - self.accepted)

    @property
    def step_ms(self) -> float:
        """Return the milliseconds per step after the first token; 0 without such steps."""
        steps = self.tokens - self.accepted - len(self.outputs)
        return 1e3 * self.decoding / steps if steps > 0 else 0.0


class Engine(Protocol):
    """What a child measures."""

    def about(self) -> dict[str, Any]:
        """Its version and settings."""

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do everything that is not measured, while no other engine computes."""

    def begin(self, job: Job) -> Callable[[list[list[int]]], Any]:
        """What writes the job's batches: only this is timed."""

    def read(self, outputs: Any) -> Written:
        """What was written, of a batch just done."""


def timed(engine: Engine, job: Job) -> Taken:
    """Generate and time the outputs of a job."""
    write, taken = engine.begin(job), Taken()
    for first in range(0, len(job.prompts), job.batch):
        began = perf_counter()
        outputs = write(job.prompts[first : first + job.batch])
        taken.each.append(perf_counter() - began)
        written = engine.read(outputs)
        taken.outputs += written.outputs
        taken.decoding += written.decoding
        taken.accepted += written.accepted
    return taken


def answer(load: Callable[[], Engine]) -> None:
    """Load in the child process, then serve requests until the parent is gone. Never returns."""
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output

    def say(**message: Any) -> None:
        wire.write(json.dumps(message) + "\n")
        wire.flush()

    engine = load()
    say(ready=monotonic(), about=engine.about())
    for line in sys.stdin:
        asked = json.loads(line)
        jobs = [Job(**job) for job in asked["jobs"]]
        try:
            if asked["prepare"]:
                engine.prepare(jobs)
                say(done=[])
            else:
                say(done=[asdict(timed(engine, job)) for job in jobs])
        except Exception as error:  # whatever it is, the next job may do
            traceback.print_exc()
            say(failed=f"{type(error).__name__}: {error}"[:300])
    os._exit(0)  # engines can take long to come down, and nothing is left to save


class Lost(Exception):
    """A child, or what it was asked for, is not there."""


class Child:
    """The parent's side. All of a child's processes are one group, and end together."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log, self.began = name, log, monotonic()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.ready = 0.0  # seconds it took
        self.about: dict[str, Any] = {}
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def wait_ready(self, seconds: float) -> None:
        """Until it is loaded; Lost where that fails or takes longer."""
        message = self._hear(seconds)
        if "ready" not in message:
            self.end()
            raise Lost(message["failed"])
        self.ready, self.about = message["ready"] - self.began, message["about"]

    def prepare(self, jobs: Sequence[Job], seconds: float) -> None:
        self._ask(jobs, True, seconds)

    def measure(self, job: Job, seconds: float) -> Taken:
        (found,) = self._ask([job], False, seconds)
        return Taken(**found)

    def end(self) -> None:
        """It and all it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._ear.join(ENDING)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was asked last may still be in it
                    pipe.close()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line[:300]}" for line in lines[-LAST_LINES:])

    def _ask(self, jobs: Sequence[Job], prepare: bool, seconds: float) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prepare": prepare, "jobs": [asdict(job) for job in jobs]}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Lost(f"it ended with {self.process.wait()}") from None
        message = self._hear(seconds)
        if "failed" in message:
            raise Lost(message["failed"])
        done: list[dict[str, Any]] = message["done"]
        return done

    def _hear(self, seconds: float) -> dict[str, Any]:
        try:
            message = self._heard.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.end()  # what it may still say would answer another question
            raise Lost(f"nothing after {seconds:.0f} s") from None
        if message is None:
            raise Lost(f"it ended with {self.process.wait()}")
        return message

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self._heard.put(json.loads(line))
            except ValueError:
                self._heard.put({"failed": f"it said {line[:100]!r}"})
        self._heard.put(None)
