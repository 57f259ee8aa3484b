"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from foretell.errors import ForetellError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers in other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin and do not wait."""
        if self.closed:
            work.close()
            raise ForetellError("the backend was closed; make another one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Begin and wait for what comes of it."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        if self.closed:
            return
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
