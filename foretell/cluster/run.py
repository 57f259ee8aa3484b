"""`foretell serve --replicas`, `foretell deploy` and its removal: start, wait for signals, drain, stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from foretell.errors import ForetellError, RequestError
from foretell.server.registry import registered
from foretell.server.run import set_up_logs

from .config import ClusterConfig
from .deploy import deploy, open_port, url
from .ray_start import RayConnection, check_installed, connect, running_here
from .replica_spec import ReplicaResources, ReplicaSpec, plan_resources

LOG = logging.getLogger("foretell")
DRAIN_POLL_SECONDS = 0.2  # between two checks whether all requests are finished


def serve_replicas(config: ClusterConfig, spec: ReplicaSpec, ignored_flags: list[str]) -> int:
    """Serve until a signal stops it; return 0 if every request was finished, else 1."""
    check_installed()
    set_up_logs(spec.server.log_format)
    if ignored_flags:
        LOG.info("ignored flags of other engines: %s", ", ".join(ignored_flags))
    ray = connect(config.address, config.dashboard, stay=False)
    signals = Signals()
    try:
        app = _start_app(config, spec, ray)
        print(app.line, flush=True)
        with registered(app.url, spec.names[0], _drafters(spec)):
            signals.wait()
            return _drain(app.handle, config, spec, signals)
    finally:
        _disconnect()


def deploy_app(config: ClusterConfig, spec: ReplicaSpec) -> int:
    """Deploy an application, or update it, and leave it running on Ray."""
    check_installed()
    set_up_logs(spec.server.log_format)
    ray = connect(config.address, config.dashboard, stay=True)
    try:
        print(_start_app(config, spec, ray).line, flush=True)
    finally:
        _disconnect()
    return 0


def remove_app(config: ClusterConfig) -> int:
    """Remove an application once its responses are complete; starts no Ray."""
    check_installed()
    if not (config.address or os.environ.get("RAY_ADDRESS") or running_here()):
        raise ForetellError("no Ray runs on this machine, so there is nothing to remove; set --address")
    connect(config.address, config.dashboard, stay=True)
    try:
        from ray import serve

        apps = sorted(serve.status().applications)
        if config.app_name not in apps:
            raise RequestError(
                "app_name", f"{config.app_name} is not deployed on this Ray; deployed: {', '.join(apps) or 'none'}"
            )
        serve.delete(config.app_name)
        print(f"foretell: {config.app_name} is removed; `ray stop` stops a Ray that was started for it")
    finally:
        _disconnect()
    return 0


@dataclass(frozen=True)
class RunningApp:
    """An application of replicas that was deployed on Ray."""

    handle: Any  # Ray's, of the gateway
    url: str
    line: str  # what is printed at the start


def _start_app(config: ClusterConfig, spec: ReplicaSpec, ray: RayConnection) -> RunningApp:
    """Deploy the application on the resources that Ray has, and describe it."""
    resources = plan_resources(config, spec, ray.resources)
    port = open_port(spec.server.host, spec.server.port, spec.server.keep_alive)
    handle = deploy(config, spec, resources)
    return RunningApp(handle, url(spec.server.host, port), startup_line(config, spec, resources, port, ray))


def _drafters(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return the drafters of the settings, for `foretell ps`."""
    return tuple(name for name in spec.speculation.drafter.split(",") if name != "none")


def startup_line(
    config: ClusterConfig, spec: ReplicaSpec, resources: ReplicaResources, port: int, ray: RayConnection
) -> str:
    """Return the line printed at the start: URL, model, replicas, routing, and the location of the logs."""
    least, most = config.min_replicas, config.max_replicas
    count = f"{least} to {most}" if most > least else str(most)
    replicas = f"{count} replica{'s' if most > 1 else ''}"
    return (
        f"foretell: {url(spec.server.host, port)} serves {spec.names[0]}; "
        f"{replicas} of {resources}, routing by {config.routing}; Ray at {ray.address}; logs: {ray.logs}"
    )


class Signals:
    """Handles SIGINT and SIGTERM: the first drains, the second stops at once, as does one while replicas load."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        self._started = False
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._handle)

    def wait(self) -> None:
        """Wait for the first signal. From now on there may be requests to drain."""
        self._started = True
        self.first.wait()

    def _handle(self, sig: int, frame: FrameType | None) -> None:
        if not self._started:
            raise KeyboardInterrupt
        (self.second if self.first.is_set() else self.first).set()


def _drain(handle: Any, config: ClusterConfig, spec: ReplicaSpec, signals: Signals) -> int:
    """Take no new requests and wait for the ongoing ones, up to the drain timeout; return the exit code."""
    from ray import serve

    handle.drain.remote().result()
    LOG.info("draining: %d requests are running", handle.ongoing.remote().result())
    deadline = time.monotonic() + spec.server.drain_timeout
    while (left := handle.ongoing.remote().result()) and time.monotonic() < deadline:
        if signals.second.wait(DRAIN_POLL_SECONDS):
            break
    if left:
        LOG.warning("%d requests were not finished in time and are aborted", left)
        serve.delete(config.app_name, _blocking=False)
        return 1
    serve.delete(config.app_name)
    return 0


def _disconnect() -> None:
    import ray

    ray.shutdown()
