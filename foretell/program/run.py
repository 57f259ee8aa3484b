"""One run of a program: its branches, its limits, and its failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import CodeType
from typing import Any

from foretell.errors import ForetellError

from .branch import Branch, RunContext
from .position import Cancelled, Position, ProgramError, error_position

DEFAULT_MAX_GENERATIONS = 10_000  # generations, selections and branches of a run


class ProgramRun:
    """Owns the branches of a run, which end with it."""

    def __init__(
        self, context: RunContext, seed: int | None = None, max_generations: int = DEFAULT_MAX_GENERATIONS
    ) -> None:
        """A program that exceeds `max_generations` is taken for an endless loop."""
        self.context, self.max_generations = context, max_generations
        self.over = threading.Event()
        self.thread: int | None = None  # id of the thread the program runs in
        self._count = 0
        self._branches: list[tuple[Branch, Future[None]]] = []
        self.root = Branch(context, seed)
        self.start(self.root)

    def start(self, branch: Branch) -> None:
        """Start a branch on the event loop."""
        self._branches.append((branch, self.context.backend.thread.start(branch.work())))

    def count(self, position: Position, more: int = 1) -> None:
        """Count generations or branches against the limit."""
        self._count += more
        if self._count > self.max_generations:
            reason = f"more than {self.max_generations} generations and branches; raise max_generations if intended"
            raise ProgramError(position, ForetellError(reason))

    def execute(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the program and wait for its branches; an error in it cancels them all."""
        self.thread = threading.get_ident()
        try:
            value = program(*args, **kwargs)
            self._wait()
        except Exception as error:
            self.cancel(found := with_position(error, program.__code__))
            if isinstance(error, ForetellError):
                raise found from found.__cause__
            error.add_note(f"in the program, {error_position(error, program.__code__)}")
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
        """Cancel all branches; the program's next append or read raises."""
        if not self.over.is_set():
            for branch, _ in list(self._branches):
                branch.cancel(reason or Cancelled())

    def _wait(self) -> None:
        for branch, _ in self._branches:
            branch.end()
        for _, work in self._branches:
            work.result()


def with_position(error: Exception, program: CodeType) -> ProgramError | Cancelled:
    """Wrap an error with the program's line in its traceback."""
    if isinstance(error, ProgramError | Cancelled):
        return error
    return ProgramError(error_position(error, program), error)
