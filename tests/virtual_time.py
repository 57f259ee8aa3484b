"""An event loop with a virtual clock: waits of minutes take no time, and no test depends on the machine's speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.waiting import TIMEOUT

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """When nothing is ready and no thread is at work, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._threads = 0  # calls in other threads that have not returned
        self._wait = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, future: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def _select(self, timeout: float | None) -> Any:
        if timeout is not None and (not self._threads or timeout == 0):
            self._now += timeout
            return self._wait(0)
        events = self._wait(TIMEOUT if self._threads else 1.0)  # a thread wakes the loop
        assert events or self._threads, "every task waits, and nothing is scheduled that could wake one"
        return events


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Return the seconds on the virtual clock."""
    return asyncio.get_running_loop().time()
