"""When callers come: as soon as they were answered, or whenever they like."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretell.errors import RequestError

from .clients import Answer

Send = Callable[[Mapping[str, Any]], Awaitable[Answer]]
BREATH = 0.2  # seconds before one who met an error tries again


@dataclass(frozen=True)
class ClosedLoop:
    """So many callers, each of whom asks again when answered."""

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise RequestError("concurrency", f"must be 1 or more, not {self.clients}")

    def __str__(self) -> str:
        return f"{self.clients} at once"

    async def run(self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str) -> list[Answer]:
        """Ask for so long; what was asked until then is answered."""
        answers: list[Answer] = []
        end = perf_counter() + seconds

        async def client() -> None:
            while perf_counter() < end:
                answers.append(await send(next(bodies)))
                if answers[-1].error is not None:
                    await asyncio.sleep(BREATH)

        await asyncio.gather(*(client() for _ in range(self.clients)))
        return answers


@dataclass(frozen=True)
class Poisson:
    """Callers who know nothing of each other, so many a second on average."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise RequestError("rate", f"must be above 0, not {self.rate}")

    def __str__(self) -> str:
        return f"{self.rate:g} a second"

    def times(self, seconds: float, seed: str) -> list[float]:
        """When they come; the same for every arm."""
        rng, at = random.Random(seed), 0.0
        found: list[float] = []
        while (at := at + rng.expovariate(self.rate)) < seconds:
            found.append(at)
        return found

    async def run(self, send: Send, bodies: Iterator[Mapping[str, Any]], seconds: float, seed: str) -> list[Answer]:
        """Let them come for so long; all of them are answered."""
        began = perf_counter()
        asked: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as group:
            for at in self.times(seconds, seed):
                await asyncio.sleep(max(0.0, began + at - perf_counter()))
                asked.append(group.create_task(_as_task(send, next(bodies))))
        return [task.result() for task in asked]


Level = ClosedLoop | Poisson


async def _as_task(send: Send, body: Mapping[str, Any]) -> Answer:
    return await send(body)
