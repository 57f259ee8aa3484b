"""All ranks of a model, as the first one sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from foretell.errors import RankError

from .collectives import PATIENCE, ProcessGroup, open_store
from .messages import LaunchSpec
from .worker_processes import WorkerProcesses


class TensorParallelGroup:
    """The first rank is this process; the others are processes of their own, which end with it."""

    def __init__(self, orders: Sequence[LaunchSpec], device: torch.device, patience: float = PATIENCE) -> None:
        """`orders` are for ranks 1 and up; `patience`: seconds to wait for a rank that lives but does not answer."""
        size = len(orders) + 1
        self._crew = WorkerProcesses(size, orders[0].threads)
        self._end = weakref.finalize(self, WorkerProcesses.close, self._crew)  # also when the program ends
        store, path = open_store(patience)
        for order in orders:
            self._crew.tell(order.shard.rank, (order, path, patience))
        self._crew.expect("here")
        self.group = group = ProcessGroup(store, 0, size, device, patience)
        self._crew.listen(lambda _: group.abort())  # not through self, which the crew would then keep alive

    @property
    def size(self) -> int:
        return self._crew.size

    @property
    def processes(self) -> list[int]:
        """Ids of the other ranks' processes."""
        return self._crew.processes

    def wait(self) -> list[int]:
        """Until all ranks can run; bytes of weights that each of the others holds."""
        return [report.weights for report in self._crew.expect("ready")]

    @property
    def heads(self) -> list[int]:
        """Of these, bytes of heads."""
        return [report.heads for report in self._crew.expect("ready")]

    def tell(self, message: bytes) -> None:
        """To all others. Refused, with the reason, when a rank is lost."""
        self.check()
        self._crew.tell_all(message)

    def check(self) -> None:
        """Raise why the ranks cannot go on, if so."""
        if self._crew.failure is not None:
            raise self._crew.failure
        if not self._end.alive:
            raise RankError("the ranks of this model were ended; load it again")

    def lost(self, error: BaseException) -> RankError:
        """What to raise when a step broke off: the ranks are out of step, and all of them end."""
        return self._crew.lost(error)

    def listen(self, told: Callable[[RankError], None]) -> None:
        """Have `flush` called once, from another thread, should a rank be lost."""
        self._crew.listen(told)

    def close(self) -> None:
        """End the other ranks."""
        self._end()
