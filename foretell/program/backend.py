"""Backends that generate for programs: the interface, its event loop thread, and the process-wide default."""

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

from .prompt_state import PromptState
from .settings import GenSettings

T = TypeVar("T")
OnText = Callable[[str], None]  # called with each chunk of streamed text


class LoopThread:
    """An event loop in its own thread, which runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine and return its future."""
        if self.closed:
            work.close()
            raise ForetellError("the backend is closed; create another one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
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


@dataclass(frozen=True)
class GenOutput:
    """The text of a generation or a selection, and its metadata."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class ProgramBackend(ABC):
    """Interface of a backend. Its coroutines run on one event loop, where the generations of all programs meet."""

    def __init__(self, name: str) -> None:
        self.thread = LoopThread(f"foretell-{name}")

    @abstractmethod
    async def encode(self, prompt: PromptState) -> list[int]:
        """Return the token ids of a prompt, as they would be prefilled."""

    @abstractmethod
    async def render(self, prompt: PromptState) -> str:
        """Apply the chat template to a chat between two turns."""

    @abstractmethod
    async def generate(self, prompt: PromptState, settings: GenSettings, on_text: OnText | None) -> GenOutput:
        """Continue a prompt; with `on_text`, stream the text to it."""

    @abstractmethod
    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """Return the log-probability of each token of a continuation, before sampling settings."""

    async def select(self, prompt: PromptState, choices: Sequence[str]) -> GenOutput:
        """Return the choice with the highest mean log-probability per token; the first of equal ones.

        All are scored from the same position on: the first token in which any of them differs from the prompt alone,
        because the tokenizer may merge the start of a choice with the end of the prompt.
        """
        alone = await self.encode(prompt)
        rows = [await self.encode(prompt.append(choice)) for choice in choices]
        start = min(_common_prefix([alone, *rows]), min(map(len, rows)) - 1)
        if start < 1:
            raise RequestError("choices", "follow an empty prompt; append some text to the state first")
        scores = await asyncio.gather(*(self.score(tokens[:start], tokens[start:]) for tokens in rows))
        means = [sum(each) / len(each) for each in scores]
        best = max(range(len(choices)), key=means.__getitem__)
        return GenOutput(choices[best], {"mean_logprobs": dict(zip(choices, means, strict=True))})

    def close(self) -> None:
        """Cancel running generations and free the resources."""
        self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all rows."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


class DefaultBackend:
    """The backend of programs that run without one, set once per process as in SGLang."""

    def __init__(self) -> None:
        self._backend: ProgramBackend | None = None

    def set(self, backend: ProgramBackend) -> None:
        """Use `backend` from now on; the previous one stays open."""
        if not isinstance(backend, ProgramBackend):
            raise TypeError(f"a backend is fp.Engine(...) or fp.RuntimeEndpoint(url), not {backend!r}")
        self._backend = backend

    def get(self) -> ProgramBackend:
        if self._backend is None:
            raise ForetellError(
                "no backend is set; call fp.set_default_backend(fp.Engine()), or with a server "
                'fp.set_default_backend(fp.RuntimeEndpoint("http://127.0.0.1:8000"))'
            )
        return self._backend


DEFAULT = DefaultBackend()


def set_default_backend(backend: ProgramBackend) -> None:
    """Set the backend of programs that run without one."""
    DEFAULT.set(backend)
