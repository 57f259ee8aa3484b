"""Collectives between ranks by torch.distributed: Gloo between CPUs, NCCL between CUDA devices."""

from __future__ import annotations

import atexit
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

dist: Any = torch.distributed  # type checkers do not know its classes
HOST = "127.0.0.1"
ABORT_TIMEOUT = 10.0  # seconds that a process waits at exit for a group to be aborted
TIMEOUT = 120.0  # seconds a rank waits for another one that is alive but does not answer


class RankTimeoutError(Exception):
    """Another rank did not answer in time."""


class ProcessGroup:
    """A process group of its own, without torch's global one, so that a process can hold shards of several models.

    An all-reduce gathers and adds in the order of the ranks. The order of a ring depends on the index of a number in
    the batch, so a draft token could be verified with other bits than the same token in plain decoding.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.device = rank, size, device
        wait = timedelta(seconds=timeout)
        make = _gloo if device.type == "cpu" else _nccl
        self._backend = make(store, rank, size, wait)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        every = flat.new_empty(self.size * len(flat))
        self._wait(lambda: self._backend._allgather_base(every, flat))
        first, *others = every.view(self.size, *x.shape).unbind()
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        if not len(x):  # a prefill step without logits
            return x.new_empty(0, sum(widths))
        own = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        every = [torch.empty_like(own) for _ in widths] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._backend.gather([every] if every else [], [own], options))
        return torch.cat([part[:, :width] for part, width in zip(every, widths, strict=True)], 1) if every else x

    def abort(self) -> None:
        """Abort the group after a rank was lost; a CUDA device would wait for it for ever.

        It runs in a thread, since it may take long. The process waits for it at exit: being torn down in the middle of
        an abort, it would not exit cleanly.
        """
        if self.device.type == "cuda":
            thread = threading.Thread(target=self._backend.abort, name="foretell-abort", daemon=True)
            thread.start()
            atexit.register(thread.join, ABORT_TIMEOUT)

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise RankTimeoutError(str(error)) from error


def open_store(timeout: float) -> tuple[Any, str]:
    """Return the store in which ranks exchange their addresses, and the path by which the other ranks open it.

    It is an anonymous file in memory, so it has no port, and only processes of this user can open the path. The file
    descriptor stays open: a store opens the path again for every call, as long as the process lives.
    """
    file = os.memfd_create("foretell-ranks")
    os.fchmod(file, 0o600)
    path = f"/proc/{os.getpid()}/fd/{file}"
    return join_store(path, timeout), path


def join_store(path: str, timeout: float) -> Any:
    """Open the store of `open_store` in another rank."""
    store = dist.FileStore(path)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _gloo(store: Any, rank: int, size: int, wait: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = wait
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, wait: timedelta) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks run on this machine; NCCL would use the network
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    return dist.ProcessGroupNCCL(store, rank, size, options)
