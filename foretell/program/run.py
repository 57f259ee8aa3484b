"""One run of a program: its texts, its end, and what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import CodeType
from typing import Any

from foretell.errors import ForetellError

from .branch import Branch, Manner
from .position import Cancelled, Place, ProgramError, failing_place

MOST_GENERATIONS = 10_000


class Run:
    """Holds all texts of a run together: they end with it."""

    def __init__(self, manner: Manner, seed: int | None = None, most: int = MOST_GENERATIONS) -> None:
        """`most`: generations, choices and branches in all; a program that wants more is taken for one without end."""
        self.manner, self.most = manner, most
        self.over = threading.Event()
        self.thread: int | None = None  # in which the program runs
        self._asked = 0
        self._branches: list[tuple[Branch, Future[None]]] = []
        self.root = Branch(manner, seed)
        self.start(self.root)

    def start(self, branch: Branch) -> None:
        """Let a text of this run be written."""
        self._branches.append((branch, self.manner.backend.thread.start(branch.work())))

    def count(self, place: Place, more: int = 1) -> None:
        """So many generations or branches more."""
        self._asked += more
        if self._asked > self.most:
            words = f"more than {self.most} generations and branches; raise max_generations if that is meant"
            raise ProgramError(place, ForetellError(words))

    def execute(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the program to its end and wait for its texts; what it fails with ends them all."""
        self.thread = threading.get_ident()
        try:
            value = program(*args, **kwargs)
            self._wait()
        except Exception as error:
            self.cancel(found := named(error, program.__code__))
            if isinstance(error, ForetellError):
                raise found from found.__cause__
            error.add_note(f"in the program, {failing_place(error, program.__code__)}")
            raise
        except BaseException:
            self.cancel()
            raise
        finally:
            self._wait()
            self.over.set()
        if self.root.failure is not None:
            raise self.root.failure
        return value

    def cancel(self, reason: Exception | None = None) -> None:
        """End it now: what is being written is given up, and the program is told where it next asks for something."""
        if not self.over.is_set():
            for branch, _ in list(self._branches):
                branch.cancel(reason or Cancelled())

    def _wait(self) -> None:
        for branch, _ in self._branches:
            branch.end()
        for _, work in self._branches:
            work.result()


def named(error: Exception, program: CodeType) -> ProgramError | Cancelled:
    """The error with the line of the program that it came through."""
    if isinstance(error, ProgramError | Cancelled):
        return error
    return ProgramError(failing_place(error, program), error)
