"""`foretell serve --replicas` and `foretell deploy`: starting, waiting, stopping."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from foretell.errors import ForetellError, RequestError
from foretell.server.run import set_up_logs

from .config import ClusterConfig
from .deploy import deploy, open_port, shown_address
from .ray_start import RayConnection, check_installed, connect, running_here
from .replica_spec import ReplicaResources, ReplicaSpec, plan_resources

LOG = logging.getLogger("foretell")
LOOK = 0.2  # seconds between two looks whether all is answered


def serve_replicas(config: ClusterConfig, served: ReplicaSpec, foreign: list[str]) -> int:
    """Serve until a signal says to stop; the exit code says whether every text was finished."""
    check_installed()
    set_up_logs(served.server.log_format)
    if foreign:
        LOG.info("flags of other engines that mean nothing here: %s", ", ".join(foreign))
    ray = connect(config.address, config.dashboard, stay=False)
    waiting = Signals()
    try:
        handle, words = _put_up(config, served, ray)
        print(words, flush=True)
        waiting.start()
        return _leave(handle, config, served, waiting)
    finally:
        _disconnect()


def deploy_app(config: ClusterConfig, served: ReplicaSpec) -> int:
    """Put an application up, or another version in its place, and leave it to Ray."""
    check_installed()
    set_up_logs(served.server.log_format)
    ray = connect(config.address, config.dashboard, stay=True)
    try:
        print(_put_up(config, served, ray)[1], flush=True)
    finally:
        _disconnect()
    return 0


def remove_app(config: ClusterConfig) -> int:
    """Take an application down when its answers are finished; no Ray is started for that."""
    check_installed()
    if not (config.address or os.environ.get("RAY_ADDRESS") or running_here()):
        raise ForetellError("no Ray runs on this machine, so there is nothing to take down; say where by address")
    connect(config.address, config.dashboard, stay=True)
    try:
        from ray import serve

        there = sorted(serve.status().applications)
        if config.app_name not in there:
            raise RequestError(
                "app_name", f"{config.app_name} is not on this Ray; what is: {', '.join(there) or 'none'}"
            )
        serve.delete(config.app_name)
        print(f"foretell: {config.app_name} is taken down; `ray stop` ends a Ray that was started for it")
    finally:
        _disconnect()
    return 0


def _put_up(config: ClusterConfig, served: ReplicaSpec, ray: RayConnection) -> tuple[Any, str]:
    room = plan_resources(config, served, ray.resources)
    server = served.server
    port = open_port(server.host, server.port, server.keep_alive)
    handle = deploy(config, served, room)
    return handle, startup_line(config, served, room, port, ray)


def startup_line(
    config: ClusterConfig, served: ReplicaSpec, room: ReplicaResources, port: int, ray: RayConnection
) -> str:
    """The line it starts with: where, what, how many, and where the logs lie."""
    count = (
        f"{config.min_replicas} to {config.max_replicas}"
        if config.max_replicas > config.min_replicas
        else str(config.max_replicas)
    )
    replicas = f"{count} replica{'s' if config.max_replicas > 1 else ''}"
    return (
        f"foretell: {shown_address(served.server.host, port)} serves {served.names[0]}; "
        f"{replicas} of {room}, routing by {config.routing}; Ray at {ray.address}; logs: {ray.logs}"
    )


class Signals:
    """Of those that say to stop, the first lets texts finish, the second does not. Before there are any texts, while
    replicas load, one ends all."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        self._started = False
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._heed)

    def start(self) -> None:
        """Now there may be texts; wait until a signal comes."""
        self._started = True
        self.first.wait()

    def _heed(self, sig: int, frame: FrameType | None) -> None:
        if not self._started:
            raise KeyboardInterrupt
        (self.second if self.first.is_set() else self.first).set()


def _leave(handle: Any, config: ClusterConfig, served: ReplicaSpec, waiting: Signals) -> int:
    """Let what is under way finish, for as long as it may take."""
    from ray import serve

    handle.leave.remote().result()
    LOG.info("%d requests are finished first", handle.ongoing.remote().result())
    deadline = time.monotonic() + served.server.drain_timeout
    while (left := handle.ongoing.remote().result()) and time.monotonic() < deadline:
        if waiting.second.wait(LOOK):
            break
    if left:
        LOG.warning("%d requests were not finished in time", left)
        serve.delete(config.app_name, _blocking=False)
        return 1
    serve.delete(config.app_name)
    return 0


def _disconnect() -> None:
    import ray

    ray.shutdown()
