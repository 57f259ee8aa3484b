"""A worker process: holds shards of models and runs the leader's messages until the connection closes."""

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


def main(connection: Connection) -> None:
    """Run a worker. It ignores interrupts: the leader decides what they mean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec, store, timeout = connection.recv()
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    try:
        connection.send(WorkerReport("started"))
        _run(spec, join_store(store, timeout), timeout, connection, inbox)
    except Exception as error:
        report = WorkerReport("failed", f"{type(error).__name__}: {error}", isinstance(error, RankTimeoutError))
        try:
            connection.send(report)
        except OSError:  # the leader is gone, which is why this failed
            sys.exit(1)
        if isinstance(error, RankTimeoutError | ForetellError):
            sys.exit(1)  # the report says it all
        raise


def _listen(connection: Connection, inbox: SimpleQueue[bytes]) -> None:
    """Receive messages. A closed connection ends the process at once, even in the middle of a step."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


@torch.inference_mode()
def _run(spec: LaunchSpec, store: Any, timeout: float, connection: Connection, inbox: SimpleQueue[bytes]) -> None:
    torch.set_num_threads(spec.threads)
    device, shard = torch.device(spec.device), spec.shard
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ProcessGroup(store, shard.rank, shard.size, device, timeout)
    models = [model_spec.load(shard, device) for model_spec in spec.models]
    for model in models:
        model.join_ranks(group)
    runners = [load_shard(model_spec, model, group) for model_spec, model in zip(spec.models, models, strict=True)]
    weights, head_bytes = (
        sum(weight_bytes(runner.model) for runner, _ in runners),
        sum(heads.bytes for _, heads in runners),
    )
    connection.send(WorkerReport("ready", weights=weights + head_bytes, heads=head_bytes))
    while True:
        _handle(inbox.get(), runners)


def _handle(message: bytes, runners: list[tuple[ModelRunner, RankHeads]]) -> None:
    number, content = parse_message(message)
    if isinstance(content, BatchLayout):
        runner, heads = runners[number]
        heads.store_hidden_states(content, runner.executor.forward(content, heads.hidden_layers).hidden_states)
    elif isinstance(content, tuple):
        runners[number][0].cache.move(*content)
    else:
        runners[0][1].apply(number, content)  # heads belong to the target, which is the first model


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
