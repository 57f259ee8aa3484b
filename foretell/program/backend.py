"""Who writes for programs: an engine in this process, or a server."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from foretell.errors import ForetellError, RequestError

from .prompt_state import Script
from .settings import Settings

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


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Written:
    """A generation or a choice, and what is known of it."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class Backend(ABC):
    """Its coroutines run on its own loop, where the generations of all programs meet."""

    def __init__(self, name: str) -> None:
        self.thread = LoopThread(f"foretell-{name}")

    @abstractmethod
    async def encode(self, script: Script) -> list[int]:
        """The tokens of a script, as they would be run."""

    @abstractmethod
    async def render(self, script: Script) -> str:
        """A chat between two turns as the text the model was trained on."""

    @abstractmethod
    async def write(self, script: Script, settings: Settings, tell: Tell | None) -> Written:
        """Continue a script; `tell` hears each piece of the text as it comes."""

    @abstractmethod
    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """The model's own log-probability of each token of a continuation."""

    async def select(self, script: Script, choices: Sequence[str]) -> Written:
        """The choice whose tokens have the highest mean log-probability; of equal ones the first.

        All are scored from the same place on: the first token in which any of them differs from the script alone,
        because a choice may be spelt together with what stands before it.
        """
        alone = await self.encode(script)
        whole = [await self.encode(script.append(choice)) for choice in choices]
        start = min(_shared([alone, *whole]), min(map(len, whole)) - 1)
        if start < 1:
            raise RequestError("choices", "have nothing before them that they could follow; give the state some text")
        found = await asyncio.gather(*(self.score(tokens[:start], tokens[start:]) for tokens in whole))
        means = [sum(each) / len(each) for each in found]
        best = max(range(len(choices)), key=means.__getitem__)
        return Written(choices[best], {"mean_logprobs": dict(zip(choices, means, strict=True))})

    def close(self) -> None:
        """End what runs and free what it holds."""
        self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with alike."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


class DefaultBackend:
    """Set once for a process, as SGLang's programs expect: they do not pass a backend along."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    def set(self, backend: Backend) -> None:
        """Programs run on it from now on; the one before stays as it is."""
        if not isinstance(backend, Backend):
            raise TypeError(f"a backend is fp.Engine(...) or fp.RuntimeEndpoint(url), not {backend!r}")
        self._backend = backend

    def get(self) -> Backend:
        if self._backend is None:
            raise ForetellError(
                "no backend is set; call fp.set_default_backend(fp.Engine()), or with a server "
                'fp.set_default_backend(fp.RuntimeEndpoint("http://127.0.0.1:8000"))'
            )
        return self._backend


DEFAULT = DefaultBackend()


def set_default_backend(backend: Backend) -> None:
    """Run programs on `backend` where none is named."""
    DEFAULT.set(backend)
