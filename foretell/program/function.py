"""A program: a function of a state, that can be run."""

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

from .backend import DEFAULT, Backend
from .branch import Manner
from .run import MOST_GENERATIONS, Run
from .settings import NAMES, Settings
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


OPTIONS = ("backend", "stream", "max_generations", *NAMES)


@dataclass(frozen=True)
class Options:
    """The backend, the seed, and settings for generations that do not say otherwise."""

    backend: Backend
    defaults: Settings = Settings()
    seed: int | None = None
    stream: bool = False
    max_generations: int = MOST_GENERATIONS

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """From arguments by name."""
        settings = Settings.read({name: value for name, value in given.items() if name in NAMES})
        sampling = dict(settings.sampling)
        seed = sampling.pop("seed", None)
        most = given.get("max_generations", MOST_GENERATIONS)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise RequestError("max_generations", f"must be 1 or more, not {most!r}")
        backend = given.get("backend") or DEFAULT.get()
        return cls(backend, replace(settings, sampling=sampling), seed, bool(given.get("stream")), most)

    def number(self, i: int) -> Options:
        """The same for run i of many: with a seed of its own."""
        if self.seed is None:
            return self
        from foretell.sampling.noise import mix  # brings torch

        return replace(self, seed=mix(self.seed, i))

    def begin(self) -> ProgramState:
        """The state of a new run."""
        run = Run(Manner(self.backend, self.defaults, self.stream), self.seed, self.max_generations)
        return ProgramState(run, run.root)


class Function:
    """What `@fp.function` makes of `def program(s, ...)`."""

    def __init__(self, program: Callable[..., Any]) -> None:
        plain = inspect.isfunction(program) and not inspect.iscoroutinefunction(program)
        names = list(inspect.signature(program).parameters) if plain else []
        if not names:
            raise TypeError(f"a program is a plain function whose first argument is its state; {program!r} is none")
        functools.update_wrapper(self, program)
        self.program = program
        self._own = frozenset(names[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and get what it returns, or its state where it returns nothing."""
        state = self.run(*args, **kwargs)
        return state if state.ret_value is None else state.ret_value

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run it with its arguments, and get its state; `ret_value` is what it returned.

        Beside its own arguments: `backend`; `stream=True`, which returns at once, for `text_iter`; `seed`, with which
        all generations draw that bring none; `max_generations`; and settings of `fp.gen` for those that do not say
        otherwise. A name that the program has as an argument is the program's.
        """
        job = self._job(args, kwargs)
        state = job.begin()
        if not job.options.stream:
            job.execute(state)
            return state

        def aside() -> None:
            with suppress(Exception):  # the state has it
                job.execute(state)

        threading.Thread(target=aside, name=f"foretell-{self.program.__name__}", daemon=True).start()
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> list[ProgramState]:
        """Run it once for each set of arguments, all at once, and get their states in that order.

        A run that fails does not end the others: its state has the reason as `error()`. Run i draws with a seed of
        its own, made of `seed` and i; the first with `seed` itself.
        """
        threads = THREADS if num_threads == "auto" else num_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise RequestError("num_threads", f"must be auto or 1 or more, not {num_threads!r}")
        for name in options:
            if name not in OPTIONS or name == "stream":
                raise TypeError(f"run_batch has no option {name!r}; arguments of the program go into each of the batch")
        if not all(isinstance(each, Mapping) for each in batch_kwargs):
            raise RequestError("batch_kwargs", "must be a list of arguments by name, such as [{'topic': 'tea'}]")
        shared = Options.read(options)
        jobs = [Job(self.program, self._bind((), each), shared.number(i)) for i, each in enumerate(batch_kwargs)]
        return run_all(jobs, threads, self.program.__name__ if progress_bar else None)

    def _job(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Job:
        options = {name: value for name, value in kwargs.items() if name in OPTIONS and name not in self._own}
        own = {name: value for name, value in kwargs.items() if name not in options}
        return Job(self.program, self._bind(args, own), Options.read(options))

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The program's own arguments, checked before anything is run; the state comes in when it is."""
        return inspect.signature(self.program).bind(None, *args, **kwargs)


def function(program: Callable[..., Any]) -> Function:
    """Make a program of `def program(s, ...)`: `s += text`, `s += fp.gen("name")`, `s["name"]`."""
    return Function(program)
