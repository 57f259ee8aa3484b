"""Connects to a running Ray, or starts one on loopback with telemetry off."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, RequestError

LOOPBACK = "127.0.0.1"
TEST_NET = ("192.0.2.1", 9)  # documentation address (RFC 5737); nothing is sent there
NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0"}
ONE_MACHINE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray listen on loopback on every system
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # responses are streamed without Ray's object store; see docs/log/
    "RAY_AUTH_MODE": "token",  # other users need the token in this user's home folder
}
MISSING = "replicas need Ray, which is not installed: pip install 'ray[serve]>=2.60,<3'"


@dataclass(frozen=True)
class RayConnection:
    """A connection to Ray. A Ray started by `foretell serve` stops with it."""

    address: str
    resources: dict[str, float]
    logs: str


def check_installed() -> None:
    """Raise ForetellError if Ray or Ray Serve is not installed, without importing it."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp_cors")):
        raise ForetellError(MISSING)


def connect(address: str | None, dashboard: bool, stay: bool) -> RayConnection:
    """Connect to the Ray at `address` or RAY_ADDRESS, or start one; with `stay` it outlives this process."""
    check_installed()
    wanted = address or os.environ.get("RAY_ADDRESS")
    existing = running_here() if wanted == "auto" or (wanted is None and stay) else wanted
    if wanted == "auto" and existing is None:
        raise RequestError("address", "no Ray runs on this machine; leave the option out to start one")
    settings = NO_TELEMETRY | (ONE_MACHINE if existing is None or is_loopback_only(existing) else {})
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # before the import: Ray reads them then
    if existing is None and stay:
        existing = _start(dashboard)
    ray = _start_in_process(dashboard) if existing is None else _join(existing)
    importlib.import_module("ray.serve")  # sets its log level, which is overridden next
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the other lines are in its log folder
    resources = {name: float(value) for name, value in ray.cluster_resources().items()}
    logs = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs")
    return RayConnection(ray.get_runtime_context().gcs_address, resources, logs)


def running_here() -> str | None:
    """Return the address of the Ray that was last started on this machine, if it still answers.

    Ray stores the address in a folder shared by all users. A file of another user is rejected: the process at that
    address would receive the settings, API keys included.
    """
    file_path = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    try:
        with open(os.open(file_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            address = file.read().strip() if stat.S_ISREG(status.st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise _untrusted(file_path) from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise _untrusted(file_path)
    return address if address and _accepts(*_host_port(address)) else None


def _untrusted(path: Path) -> RequestError:
    reason = f"{path} is not trusted: another user created it or can change it"
    return RequestError("address", f"{reason}; name the Ray by HOST:PORT, or set RAY_TMPDIR to a folder of your own")


def is_loopback_only(address: str) -> bool:
    """Return whether a Ray can be reached only from this machine."""
    host, port = _host_port(address)
    return host in (LOOPBACK, "localhost") and not _accepts(_external_address(), port)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port) if port.isdigit() else 0


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _external_address() -> str:
    """Return this machine's address on its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(TEST_NET)
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _start_in_process(dashboard: bool) -> Any:
    import ray

    ray.init(
        address="local",
        include_dashboard=dashboard,
        dashboard_host=LOOPBACK,
        _node_ip_address=LOOPBACK,
        log_to_driver=False,
        logging_level="warning",
    )
    return ray


def _join(address: str) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        first = str(error).strip().splitlines()[:1]
        raise RequestError("address", f"cannot connect to Ray at {address}: {' '.join(first)}") from None
    return ray


def _start(dashboard: bool) -> str:
    """Start a Ray on this machine that runs until `ray stop`; return its address."""
    tool = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*tool, "get-auth-token", "--generate"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    arguments = ["start", "--head", f"--node-ip-address={LOOPBACK}", "--port=0", "--disable-usage-stats"]
    arguments += [f"--include-dashboard={'true' if dashboard else 'false'}", f"--dashboard-host={LOOPBACK}"]
    done = subprocess.run([*tool, *arguments], capture_output=True, text=True)
    address = running_here()
    if done.returncode or address is None:
        raise ForetellError(f"Ray did not start: {' '.join((done.stderr or done.stdout).split())[-400:]}")
    return address
