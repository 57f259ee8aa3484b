"""Programs: the `@function` decorator, run options, and batches of runs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import BoundArguments
from typing import Any

from foretell.errors import RequestError

from .backend import DEFAULT, ProgramBackend
from .branch import RunContext
from .run import DEFAULT_MAX_GENERATIONS, ProgramRun
from .settings import NAMES, GenSettings
from .state import ProgramState

MAX_THREADS = 128  # runs at once; more wait


@dataclass(frozen=True)
class ProgramJob:
    """A program with its arguments and options."""

    program: Callable[..., Any]
    arguments: BoundArguments  # the first, the state, is None
    options: RunOptions

    def begin(self) -> ProgramState:
        return self.options.begin()

    def execute(self, state: ProgramState) -> None:
        """Run the program; its error is raised here and kept in the state."""
        state.execute(self.program, *self.arguments.args[1:], **self.arguments.kwargs)


def run_batch_jobs(jobs: Sequence[ProgramJob], threads: int, title: str | None = None) -> list[ProgramState]:
    """Run all jobs in threads and return their states in order; with a title, show a progress bar."""
    from rich.console import Console
    from rich.progress import track

    stopped = threading.Event()
    started: list[ProgramState] = []

    def run(job: ProgramJob) -> ProgramState:
        state = job.begin()
        started.append(state)
        if stopped.is_set():
            state.cancel()
        with suppress(Exception):  # the error is in the state
            job.execute(state)
        return state

    with ThreadPoolExecutor(max(1, min(threads, len(jobs))), "foretell-program") as pool:
        runs = [pool.submit(run, job) for job in jobs]
        try:
            done = as_completed(runs)
            for _ in track(done, title or "", len(runs), console=Console(stderr=True), disable=title is None):
                pass
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for state in list(started):
                state.cancel()
            raise
    return [run.result() for run in runs]


RUN_OPTIONS = ("backend", "stream", "max_generations", *NAMES)


@dataclass(frozen=True)
class RunOptions:
    """Backend, seed and default settings of a run."""

    backend: ProgramBackend
    defaults: GenSettings = GenSettings()
    seed: int | None = None
    stream: bool = False
    max_generations: int = DEFAULT_MAX_GENERATIONS

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> RunOptions:
        """Read the options from keyword arguments."""
        settings = GenSettings.read({name: value for name, value in given.items() if name in NAMES})
        sampling = dict(settings.sampling)
        seed = sampling.pop("seed", None)
        limit = given.get("max_generations", DEFAULT_MAX_GENERATIONS)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise RequestError("max_generations", f"must be 1 or more, not {limit!r}")
        backend = given.get("backend") or DEFAULT.get()
        return cls(backend, replace(settings, sampling=sampling), seed, bool(given.get("stream")), limit)

    def for_run(self, i: int) -> RunOptions:
        """Return the options of run i of a batch, with its own seed."""
        if self.seed is None:
            return self
        from foretell.sampling.noise import derive_seed  # imports torch

        return replace(self, seed=derive_seed(self.seed, i))

    def begin(self) -> ProgramState:
        """Return the state of a new run."""
        run = ProgramRun(RunContext(self.backend, self.defaults, self.stream), self.seed, self.max_generations)
        return ProgramState(run, run.root)


class ProgramFunction:
    """A program made by `@fp.function` from `def program(s, ...)`."""

    def __init__(self, program: Callable[..., Any]) -> None:
        plain = inspect.isfunction(program) and not inspect.iscoroutinefunction(program)
        names = list(inspect.signature(program).parameters) if plain else []
        if not names:
            raise TypeError(f"a program must be a plain function whose first argument is its state, not {program!r}")
        functools.update_wrapper(self, program)
        self.program = program
        self._own = frozenset(names[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program and return its return value, or its state if that is None."""
        state = self.run(*args, **kwargs)
        return state if state.ret_value is None else state.ret_value

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state; `ret_value` is its return value.

        Besides the program's arguments: `backend`; `stream=True`, which returns at once, for `text_iter`; `seed` of
        generations without one; `max_generations`; and default settings of `fp.gen`. A name that the program has as
        a parameter is passed to the program.
        """
        job = self._job(args, kwargs)
        state = job.begin()
        if not job.options.stream:
            job.execute(state)
            return state

        def run_in_background() -> None:
            with suppress(Exception):  # the error is in the state
                job.execute(state)

        threading.Thread(target=run_in_background, name=f"foretell-{self.program.__name__}", daemon=True).start()
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> list[ProgramState]:
        """Run the program for each set of arguments, all at once, and return the states in order.

        A run that fails does not end the others: its state has the reason as `error()`. Run i samples with a
        seed derived from `seed` and i; the first with `seed` itself.
        """
        threads = MAX_THREADS if num_threads == "auto" else num_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise RequestError("num_threads", f"must be auto or 1 or more, not {num_threads!r}")
        for name in options:
            if name not in RUN_OPTIONS or name == "stream":
                raise TypeError(f"run_batch has no option {name!r}; put arguments of the program into batch_kwargs")
        if not all(isinstance(each, Mapping) for each in batch_kwargs):
            raise RequestError("batch_kwargs", "must be a list of arguments by name, such as [{'topic': 'tea'}]")
        shared = RunOptions.read(options)
        jobs = [
            ProgramJob(self.program, self._bind((), each), shared.for_run(i)) for i, each in enumerate(batch_kwargs)
        ]
        return run_batch_jobs(jobs, threads, self.program.__name__ if progress_bar else None)

    def _job(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProgramJob:
        options = {name: value for name, value in kwargs.items() if name in RUN_OPTIONS and name not in self._own}
        own = {name: value for name, value in kwargs.items() if name not in options}
        return ProgramJob(self.program, self._bind(args, own), RunOptions.read(options))

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Bind the program's arguments, before anything runs; the state is filled in later."""
        return inspect.signature(self.program).bind(None, *args, **kwargs)


def function(program: Callable[..., Any]) -> ProgramFunction:
    """Make a program from `def program(s, ...)`: `s += text`, `s += fp.gen("name")`, `s["name"]`."""
    return ProgramFunction(program)
