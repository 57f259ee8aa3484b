"""Many runs at once, each in a thread of its own: what they generate is one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

from .options import Options
from .state import ProgramState

THREADS = 128  # more runs than this wait for one to end


@dataclass(frozen=True)
class Job:
    """A program with its arguments, ready to be run."""

    program: Callable[..., Any]
    arguments: BoundArguments  # the state's place is empty
    options: Options

    def begin(self) -> ProgramState:
        return self.options.begin()

    def execute(self, state: ProgramState) -> None:
        """To its end; what it fails with is raised here, and the state has it too."""
        state.execute(self.program, *self.arguments.args[1:], **self.arguments.kwargs)


def run_all(jobs: Sequence[Job], threads: int, title: str | None = None) -> list[ProgramState]:
    """The states of all jobs, in their order, once all have ended. With a title, a bar shows how far they are."""
    from tqdm import tqdm

    stopped = threading.Event()
    begun: list[ProgramState] = []

    def run(job: Job) -> ProgramState:
        state = job.begin()
        begun.append(state)
        if stopped.is_set():
            state.cancel()
        with suppress(Exception):  # the state has it
            job.execute(state)
        return state

    with ThreadPoolExecutor(max(1, min(threads, len(jobs))), "foretell-program") as pool:
        runs = [pool.submit(run, job) for job in jobs]
        try:
            for _ in tqdm(as_completed(runs), desc=title, total=len(runs), unit="run", disable=title is None):
                pass
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for state in list(begun):
                state.cancel()
            raise
    return [run.result() for run in runs]
