"""How ranks tell each other numbers: torch.distributed, with Gloo between CPUs and NCCL between CUDA devices."""

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

dist: Any = torch.distributed  # its classes are there, but not for type checkers
HOST = "127.0.0.1"
ABORT_TIMEOUT = 10.0  # seconds at most that a process waits at its end for a group to be aborted
TIMEOUT = 120.0  # seconds a rank waits for another that lives but does not answer


class RankTimeoutError(Exception):
    """Another rank did not answer."""


class ProcessGroup:
    """Its own group of processes, none of torch's globals: several models may be split in one process.

    Sums are gathered and added in the order of the ranks. A ring's order would hang on where in a batch a number
    stands, and a guess could be judged by other bits than the text it becomes.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, patience: float) -> None:
        self.rank, self.size, self.device = rank, size, device
        wait = timedelta(seconds=patience)
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
        if not len(x):  # a step that only reads: nobody asks
            return x.new_empty(0, sum(widths))
        own = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        every = [torch.empty_like(own) for _ in widths] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._backend.gather([every] if every else [], [own], options))
        return torch.cat([part[:, :width] for part, width in zip(every, widths, strict=True)], 1) if every else x

    def abort(self) -> None:
        """Let nobody wait for a rank that has gone: a CUDA device would do so for ever. Aside, for it may take long;
        but a process that ends before it is done is torn down under it, and does not end as it should."""
        if self.device.type == "cuda":
            aside = threading.Thread(target=self._backend.abort, name="foretell-abort", daemon=True)
            aside.start()
            atexit.register(aside.join, ABORT_TIMEOUT)

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise RankTimeoutError(str(error)) from error


def open_store(patience: float) -> tuple[Any, str]:
    """Return the store in which ranks exchange their addresses, and the path by which the other ranks open it.

    It is an anonymous file in memory, so it has no port, and only processes of this user can open the path. The file
    descriptor stays open: a store opens the path again for every call, as long as the process lives.
    """
    file = os.memfd_create("foretell-ranks")
    os.fchmod(file, 0o600)
    path = f"/proc/{os.getpid()}/fd/{file}"
    return join_store(path, patience), path


def join_store(path: str, patience: float) -> Any:
    """Open the store of `open_store` in another rank."""
    store = dist.FileStore(path)
    store.set_timeout(timedelta(seconds=patience))
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
