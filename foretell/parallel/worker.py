"""A process that has a part of a model: it runs the steps it is told of until the line to the first rank closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from foretell.errors import ForetellError
from foretell.models.shard import Shard
from foretell.runner.runner import ModelRunner

from .crew import Report
from .group import Group, PartedError, find_store
from .messages import read_message
from .order import Order, Part, held_bytes


def main(line: Connection) -> None:
    """Do as told. Of an interrupt the first rank alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order, port, patience = line.recv()
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, inbox), daemon=True).start()
    try:
        line.send(Report("here"))
        _work(order, find_store(port, patience), patience, line, inbox)
    except Exception as error:
        line.send(Report("failed", f"{type(error).__name__}: {error}", isinstance(error, PartedError)))
        if isinstance(error, PartedError | ForetellError):
            sys.exit(1)  # all is said
        raise


def _listen(line: Connection, inbox: SimpleQueue[bytes]) -> None:
    """A closed line ends the process at once, in the midst of a step too: nobody is left who would want it."""
    try:
        while True:
            inbox.put(line.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


@torch.inference_mode()
def _work(order: Order, store: Any, patience: float, line: Connection, inbox: SimpleQueue[bytes]) -> None:
    torch.set_num_threads(order.threads)
    device, shard = torch.device(order.device), order.shard
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(store, shard.rank, shard.size, device, patience)
    runners = [_runner(part, shard, device, group) for part in order.parts]
    line.send(Report("ready", weights=sum(held_bytes(runner.model) for runner in runners)))
    while True:
        model, message = read_message(inbox.get())
        if isinstance(message, tuple):
            runners[model].cache.move(*message)
        else:
            runners[model].executor(message, ())


def _runner(part: Part, shard: Shard, device: torch.device, group: Group) -> ModelRunner:
    model = part.load(shard, device)
    model.meet(group)
    return ModelRunner(model, part.pages, part.page_size, part.context)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
