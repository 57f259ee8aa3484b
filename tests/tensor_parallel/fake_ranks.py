"""Ranks as threads of one process, one running at a time: sharding without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tests.waiting import TIMEOUT

T = TypeVar("T")


class FakeRanks:
    """One of the ranks; while it waits for the others, they run."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self._shared = rank, shared

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._exchange(x)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        every = self._exchange(x)
        assert [part.shape[1] for part in every] == list(widths)
        return torch.cat(every, 1) if self.rank == 0 else x

    def _exchange(self, x: Tensor) -> list[Tensor]:
        shared = self._shared
        shared.values[self.rank] = x.clone()
        shared.wait()
        found = list(shared.values)
        shared.wait()
        return found


class Shared:
    """Tensors that the ranks exchange."""

    def __init__(self, size: int) -> None:
        self.values: list[Tensor] = [torch.empty(0)] * size
        self.running = threading.Lock()
        self._barrier = threading.Barrier(size)

    def wait(self) -> None:
        self.running.release()
        self._barrier.wait(TIMEOUT)
        self.running.acquire()

    def give_up(self) -> None:
        self._barrier.abort()


def run_ranks(size: int, work: Callable[[FakeRanks], T]) -> list[T]:
    """Run work on each rank and return the results."""
    shared = Shared(size)

    @torch.inference_mode()
    def one(rank: int) -> T:
        with shared.running:
            try:
                return work(FakeRanks(rank, shared))
            except BaseException:
                shared.give_up()
                raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
