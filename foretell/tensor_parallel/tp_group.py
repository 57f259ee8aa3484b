"""The tensor-parallel group as the leader sees it: checks before the launch, launch, messages and failures."""

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
    """All ranks of a model. The leader is this process; the workers are processes of their own and end with it."""

    def __init__(self, specs: Sequence[LaunchSpec], device: torch.device, timeout: float = TIMEOUT) -> None:
        """`specs` are for ranks 1 and up; `timeout`: seconds to wait for a rank that is alive but does not answer."""
        size = len(specs) + 1
        self._workers = WorkerProcesses(size, specs[0].threads)
        self._end = weakref.finalize(self, WorkerProcesses.close, self._workers)  # also at exit
        store, path = open_store(timeout)
        for spec in specs:
            self._workers.send(spec.shard.rank, (spec, path, timeout))
        self._workers.wait_for("started")
        self.group = group = ProcessGroup(store, 0, size, device, timeout)
        self._workers.on_failure(lambda _: group.abort())  # without self, which the callback would keep alive

    @property
    def size(self) -> int:
        return self._workers.size

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return self._workers.pids

    def wait_ready(self) -> list[int]:
        """Wait until all workers are ready; return the bytes of weights on each of them."""
        return [report.weights for report in self._workers.wait_for("ready")]

    @property
    def head_weights(self) -> list[int]:
        """Return the bytes of head weights on each worker."""
        return [report.heads for report in self._workers.wait_for("ready")]

    def broadcast(self, message: bytes) -> None:
        """Send a message to all workers; raise the reason if a rank is lost."""
        self.check()
        self._workers.broadcast(message)

    def check(self) -> None:
        """Raise if a rank is lost or the group was closed."""
        if self._workers.failure is not None:
            raise self._workers.failure
        if not self._end.alive:
            raise RankError("the tensor-parallel workers of this model were stopped; load it again")

    def fail(self, error: BaseException) -> RankError:
        """Stop all workers after a failed step, since they are out of step; return the error to raise."""
        return self._workers.fail(error)

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """Call `callback` once, from another thread, if a rank is lost."""
        self._workers.on_failure(callback)

    def close(self) -> None:
        """Stop the workers."""
        self._end()


GIB = 1 << 30


def check_ranks(target: ModelConfig, device: torch.device, speculation: SpeculationConfig, ranks: int) -> None:
    """Raise RequestError for what cannot be sharded, before anything is started."""
    check_draft(speculation, ranks)
    if ranks == 1:
        return
    check_tensor_parallel_size(target, ranks)
    for name in re.split("[,+]", speculation.drafter):  # several to choose from, or several in one tree
        if name.strip().partition(":")[0] in ("self", "exit"):
            message = f"{name.strip()} runs the target's own layers, which are sharded over {ranks} ranks"
            raise RequestError("drafter", f"{message}; use another drafter")
    if device.type == "cuda":
        check_devices(device, ranks)


def check_devices(device: torch.device, ranks: int) -> None:
    """Raise RequestError unless there is a CUDA device for each rank, in spec."""
    if device.index:
        raise RequestError("device", f"{ranks} ranks run on cuda:0 to cuda:{ranks - 1}; use cuda instead of {device}")
    if torch.cuda.device_count() < ranks:
        message = f"{ranks} ranks need a CUDA device each; there are {torch.cuda.device_count()}"
        raise RequestError("tensor_parallel_size", message)


def check_draft(speculation: SpeculationConfig, ranks: int) -> None:
    """Raise RequestError unless a draft model is on the leader only, or sharded like the target."""
    size = speculation.draft_tensor_parallel_size
    if size not in (1, ranks):
        message = f"must be 1, for a draft model on the first rank, or {ranks}, as for the target; not {size}"
        raise RequestError(
            "draft_tensor_parallel_size", message if ranks > 1 else "must be 1: the target is not sharded"
        )
    if size > 1 and speculation.draft_device is not None:
        raise RequestError(
            "draft_device", "needs a draft model that is not sharded; leave draft_tensor_parallel_size out"
        )


def launch_workers(models: Sequence[ModelShardSpec], device: torch.device, ranks: int) -> TensorParallelGroup:
    """Start the workers; they load their shards while the leader loads its own."""
    native_for(device)  # compile once, not on every rank
    threads = torch.get_num_threads()
    devices = [f"cuda:{rank}" if device.type == "cuda" else "cpu" for rank in range(ranks)]
    specs = [LaunchSpec(Shard(rank, ranks), devices[rank], threads, tuple(models)) for rank in range(1, ranks)]
    return TensorParallelGroup(specs, device)


def describe_ranks(weights: list[int]) -> str:
    """Describe the weights on each rank in one line."""
    sizes = ", ".join(f"{size / GIB:.2f}" for size in weights)
    return f"{len(weights)} ranks hold {sizes} GiB of weights, {sum(weights) / GIB:.2f} GiB in all"
