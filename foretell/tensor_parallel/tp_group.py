"""All ranks of a model, as the first one sees them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence

import torch

from foretell.config import SpeculationConfig
from foretell.errors import RankError, RequestError
from foretell.models.config import ModelConfig
from foretell.models.quantize import native_for
from foretell.models.sharding import Shard, check_tensor_parallel_size
from foretell.tensor_parallel.collectives import TIMEOUT, ProcessGroup, open_store
from foretell.tensor_parallel.messages import LaunchSpec, ModelShardSpec
from foretell.tensor_parallel.worker_processes import WorkerProcesses


class TensorParallelGroup:
    """The first rank is this process; the others are processes of their own, which end with it."""

    def __init__(self, orders: Sequence[LaunchSpec], device: torch.device, patience: float = TIMEOUT) -> None:
        """`orders` are for ranks 1 and up; `patience`: seconds to wait for a rank that lives but does not answer."""
        size = len(orders) + 1
        self._workers = WorkerProcesses(size, orders[0].threads)
        self._end = weakref.finalize(self, WorkerProcesses.close, self._workers)  # also when the program ends
        store, path = open_store(patience)
        for order in orders:
            self._workers.send(order.shard.rank, (order, path, patience))
        self._workers.wait_for("here")
        self.group = group = ProcessGroup(store, 0, size, device, patience)
        self._workers.on_failure(lambda _: group.abort())  # not through self, which the crew would then keep alive

    @property
    def size(self) -> int:
        return self._workers.size

    @property
    def pids(self) -> list[int]:
        """Ids of the other ranks' processes."""
        return self._workers.pids

    def wait_ready(self) -> list[int]:
        """Until all ranks can run; bytes of weights that each of the others holds."""
        return [report.weights for report in self._workers.wait_for("ready")]

    @property
    def head_weights(self) -> list[int]:
        """Of these, bytes of heads."""
        return [report.heads for report in self._workers.wait_for("ready")]

    def broadcast(self, message: bytes) -> None:
        """To all others. Refused, with the reason, when a rank is lost."""
        self.check()
        self._workers.broadcast(message)

    def check(self) -> None:
        """Raise why the ranks cannot go on, if so."""
        if self._workers.failure is not None:
            raise self._workers.failure
        if not self._end.alive:
            raise RankError("the ranks of this model were ended; load it again")

    def fail(self, error: BaseException) -> RankError:
        """What to raise when a step broke off: the ranks are out of step, and all of them end."""
        return self._workers.fail(error)

    def on_failure(self, told: Callable[[RankError], None]) -> None:
        """Have `flush` called once, from another thread, should a rank be lost."""
        self._workers.on_failure(told)

    def close(self) -> None:
        """End the other ranks."""
        self._end()


GIB = 1 << 30


def check_ranks(target: ModelConfig, device: torch.device, speculation: SpeculationConfig, ranks: int) -> None:
    """Refuse what cannot be split, before anything is started."""
    check_draft(speculation, ranks)
    if ranks == 1:
        return
    check_tensor_parallel_size(target, ranks)
    for name in re.split("[,+]", speculation.drafter):  # several to choose from, or several in one tree
        if name.strip().partition(":")[0] in ("self", "exit"):
            words = f"{name.strip()} runs the target's own layers, which lie on {ranks} ranks; take another drafter"
            raise RequestError("drafter", words)
    if device.type == "cuda":
        check_devices(device, ranks)


def check_devices(device: torch.device, ranks: int) -> None:
    """Ranks take the devices in order, each its own."""
    if device.index:
        raise RequestError("device", f"{ranks} ranks run on cuda:0 to cuda:{ranks - 1}; say cuda instead of {device}")
    if torch.cuda.device_count() < ranks:
        words = f"{ranks} ranks need a CUDA device each, and there are {torch.cuda.device_count()}"
        raise RequestError("tensor_parallel_size", words)


def check_draft(speculation: SpeculationConfig, ranks: int) -> None:
    """A draft model lies whole on the first rank, or is split as the target is."""
    size = speculation.draft_tensor_parallel_size
    if size not in (1, ranks):
        words = (
            f"must be 1, for a draft model that lies whole on the first rank, or {ranks}, as the target's; not {size}"
        )
        raise RequestError("draft_tensor_parallel_size", words if ranks > 1 else "must be 1: the target is not split")
    if size > 1 and speculation.draft_device is not None:
        raise RequestError("draft_device", "is for a draft model that is whole; leave draft_tensor_parallel_size out")


def launch_workers(parts: Sequence[ModelShardSpec], device: torch.device, ranks: int) -> TensorParallelGroup:
    """The other ranks; they load while this one does."""
    native_for(device)  # compiled once, and not by every rank
    threads = torch.get_num_threads()
    devices = [f"cuda:{rank}" if device.type == "cuda" else "cpu" for rank in range(ranks)]
    orders = [LaunchSpec(Shard(rank, ranks), devices[rank], threads, tuple(parts)) for rank in range(1, ranks)]
    return TensorParallelGroup(orders, device)


def describe_ranks(weights: list[int]) -> str:
    """What each rank holds, in one line."""
    sizes = ", ".join(f"{size / GIB:.2f}" for size in weights)
    return f"{len(weights)} ranks hold {sizes} GiB of weights, {sum(weights) / GIB:.2f} GiB in all"
