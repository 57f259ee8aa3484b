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
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.model_runner import ModelRunner

from .collectives import ProcessGroup, RankTimeoutError, join_store
from .head_worker import RankHeads, load_shard
from .messages import LaunchSpec, parse_message, weight_bytes
from .worker_processes import WorkerReport


def main(line: Connection) -> None:
    """Do as told. Of an interrupt the first rank alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order, store, patience = line.recv()
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, inbox), daemon=True).start()
    try:
        line.send(WorkerReport("here"))
        _run(order, join_store(store, patience), patience, line, inbox)
    except Exception as error:
        line.send(WorkerReport("failed", f"{type(error).__name__}: {error}", isinstance(error, RankTimeoutError)))
        if isinstance(error, RankTimeoutError | ForetellError):
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
def _run(order: LaunchSpec, store: Any, patience: float, line: Connection, inbox: SimpleQueue[bytes]) -> None:
    torch.set_num_threads(order.threads)
    device, shard = torch.device(order.device), order.shard
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ProcessGroup(store, shard.rank, shard.size, device, patience)
    models = [part.load(shard, device) for part in order.models]
    for model in models:
        model.join_ranks(group)
    runners = [load_shard(part, model, group) for part, model in zip(order.models, models, strict=True)]
    weights, guessing = (
        sum(weight_bytes(runner.model) for runner, _ in runners),
        sum(heads.bytes for _, heads in runners),
    )
    line.send(WorkerReport("ready", weights=weights + guessing, heads=guessing))
    while True:
        _handle(inbox.get(), runners)


def _handle(message: bytes, runners: list[tuple[ModelRunner, RankHeads]]) -> None:
    number, told = parse_message(message)
    if isinstance(told, BatchLayout):
        runner, heads = runners[number]
        heads.store_hidden_states(told, runner.executor.forward(told, heads.hidden_layers).hidden_states)
    elif isinstance(told, tuple):
        runners[number][0].cache.move(*told)
    else:
        runners[0][1].apply(number, told)  # heads guess for the target, which is the first


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
