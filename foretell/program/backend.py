"""Who writes for programs: an engine in this process, or a server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from foretell.errors import RequestError

from .loop import LoopThread
from .prompt_state import Script
from .settings import Settings

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
