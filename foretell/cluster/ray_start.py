"""Ray itself: one that runs already, or one of our own, on loopback and silent."""

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
ELSEWHERE = ("192.0.2.1", 9)  # an address kept for examples: nothing is sent there
SILENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is told to anybody
ONE_MACHINE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's words for: on loopback, whatever the system
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # answers come as they are, not as Ray's objects; see docs/log/
    "RAY_AUTH_MODE": "token",  # other users of the machine need the token that Ray keeps in this user's home
}
MISSING = "replicas run on Ray, which is not installed: pip install 'foretell[cluster]'"


@dataclass(frozen=True)
class RayConnection:
    """A connection. A Ray that was started for `foretell serve` ends with it."""

    address: str
    resources: dict[str, float]
    logs: str


def check_installed() -> None:
    """Refuse what needs Ray where there is none, or one without Serve. Nothing of it is imported yet."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp_cors")):
        raise ForetellError(MISSING)


def connect(address: str | None, dashboard: bool, stay: bool) -> RayConnection:
    """To the Ray at `address` or RAY_ADDRESS; else to one that is started here, which may `stay` when we have gone."""
    check_installed()
    wanted = address or os.environ.get("RAY_ADDRESS")
    found = running_here() if wanted == "auto" or (wanted is None and stay) else wanted
    if wanted == "auto" and found is None:
        raise RequestError("address", "no Ray runs on this machine; leave it out to have one started")
    settings = SILENT | (ONE_MACHINE if found is None or is_closed(found) else {})
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # before Ray is imported, which reads them then
    if found is None and stay:
        found = _start(dashboard)
    ray = _own(dashboard) if found is None else _join(found)
    importlib.import_module("ray.serve")  # which says how much it logs
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its other lines lie in its folder of logs
    there = {name: float(value) for name, value in ray.cluster_resources().items()}
    logs = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs")
    return RayConnection(ray.get_runtime_context().gcs_address, there, logs)


def running_here() -> str | None:
    """Return the address of the Ray that was last started on this machine, if it still answers.

    Ray notes it in a folder that all users share. A note of another user is refused: the process at that address
    would receive the settings, API keys included.
    """
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    try:
        with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            found = file.read().strip() if stat.S_ISREG(status.st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise _untrusted(note) from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise _untrusted(note)
    return found if found and _answers(*_parts(found)) else None


def _untrusted(note: Path) -> RequestError:
    reason = f"{note} is not trusted: another user made it or may change it"
    return RequestError("address", f"{reason}; name the Ray by HOST:PORT, or set RAY_TMPDIR to a folder of your own")


def is_closed(address: str) -> bool:
    """Whether a Ray can be reached from this machine alone."""
    host, port = _parts(address)
    return host in (LOOPBACK, "localhost") and not _answers(_outward(), port)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port) if port.isdigit() else 0


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _outward() -> str:
    """This machine's address as others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _own(dashboard: bool) -> Any:
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
        raise RequestError("address", f"no Ray lets us in at {address}: {' '.join(first)}") from None
    return ray


def _start(dashboard: bool) -> str:
    """A Ray on this machine that stays until `ray stop`."""
    tool = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*tool, "get-auth-token", "--generate"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = ["start", "--head", f"--node-ip-address={LOOPBACK}", "--port=0", "--disable-usage-stats"]
    words += [f"--include-dashboard={'true' if dashboard else 'false'}", f"--dashboard-host={LOOPBACK}"]
    done = subprocess.run([*tool, *words], capture_output=True, text=True)
    address = running_here()
    if done.returncode or address is None:
        raise ForetellError(f"Ray did not start: {' '.join((done.stderr or done.stdout).split())[-400:]}")
    return address
