"""A program: a function of a state, that can be run."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from foretell.errors import RequestError

from .batch import THREADS, Job, run_all
from .options import OPTIONS, Options
from .state import ProgramState


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
