"""Ray itself: one that runs already, or one of our own, on loopback and silent."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from foretell.errors import ForetellError, RequestError

LOOPBACK = "127.0.0.1"
SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is told to anybody
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # lines of Ray's own lie in its folder of logs
}
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's word for: all of it on loopback, on any system
MISSING = "replicas run on Ray, which is not installed: pip install 'foretell[cluster]'"


@dataclass(frozen=True)
class Ray:
    """A connection. One that was started here for `foretell serve` ends with it."""

    address: str
    resources: dict[str, float]
    logs: str


def check_installed() -> None:
    """Refuse what needs Ray where there is none, or one without Serve; nothing is imported yet."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp_cors")):
        raise ForetellError(MISSING)


def connect(address: str | None, dashboard: bool, stay: bool) -> Ray:
    """To the Ray at `address` or RAY_ADDRESS; else to one that is started here, which may `stay` when we have gone."""
    check_installed()
    address = address or os.environ.get("RAY_ADDRESS")
    here = address is None or address.startswith((LOOPBACK, "localhost"))
    for name, value in (SILENT | (ONE_MACHINE if here else {})).items():  # Ray reads them when it is imported
        os.environ.setdefault(name, value)
    if address is None and stay:
        address = _running() or _start(dashboard)
    ray = _join(address) if address is not None else _own(dashboard)
    there = {name: float(value) for name, value in ray.cluster_resources().items()}
    node = ray._private.worker._global_node
    return Ray(ray.get_runtime_context().gcs_address, there, os.path.join(node.get_session_dir_path(), "logs"))


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

    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError("address", f"no Ray answers at {address}: {first}") from None
    return ray


def _running() -> str | None:
    """The address of a Ray on this machine."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    found = find_gcs_addresses()
    if not found:
        return None
    return find_bootstrap_address(None) or next(iter(found))


def _start(dashboard: bool) -> str:
    """A Ray on this machine that stays until `ray stop`."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--node-ip-address={LOOPBACK}"]
    words += [f"--include-dashboard={'true' if dashboard else 'false'}", "--disable-usage-stats", "--port=0"]
    done = subprocess.run(words, capture_output=True, text=True)
    address = _running()
    if done.returncode or address is None:
        raise ForetellError(f"Ray did not start: {' '.join((done.stderr or done.stdout).split())[-400:]}")
    return address
