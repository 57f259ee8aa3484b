"""Deploys the gateway and the replicas as an application on Ray Serve, or updates one."""

from __future__ import annotations

from typing import Any

from foretell.errors import ForetellError
from foretell.server.run import bind

from .config import ClusterConfig
from .gateway import TIMEOUT_GRACE, Ingress, application
from .replica import ReplicaServer
from .replica_spec import ReplicaResources, ReplicaSpec

ROUTER = "foretell.cluster.router.PrefixRouter"
REPLICA_DEPLOYMENT, GATEWAY_DEPLOYMENT = "replica", "front"  # names on Ray
GATEWAY_MAX_REQUESTS = 100_000  # ongoing requests in the gateway; each replica has its own limit
MAX_START_FAILURES = 3  # failed starts of a replica before the deployment fails
DRAIN_POLL_SECONDS = 0.5  # between two checks whether a stopping replica is idle


def open_port(host: str, port: int, keep_alive: int) -> int:
    """Start Ray Serve's HTTP proxy, or use the running one; return its port."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    running = _running_proxy()
    if running is None:
        with bind(host, port) as bound:  # fails at once if the port is taken, and finds a free one for port 0
            port = bound.getsockname()[1]
        options = HTTPOptions(host=host, port=port, keep_alive_timeout_s=keep_alive)
        serve.start(proxy_location="HeadOnly", http_options=options)
        return port
    if running != (host, port) and port != 0:
        raise ForetellError(
            f"Ray Serve already listens on {running[0]}:{running[1]}; use that address, or run `serve shutdown` first"
        )
    return running[1]


def _running_proxy() -> tuple[str, int] | None:
    """Return host and port of this cluster's Ray Serve proxy, or None if it does not run."""
    from ray.serve._private.api import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        client: Any = _get_global_client(raise_if_no_controller_running=False)
    except RayServeException:
        return None
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def deploy(config: ClusterConfig, spec: ReplicaSpec, resources: ReplicaResources) -> Any:
    """Run the application and wait until it answers; a running one of this name is updated replica by replica."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    replica_options = _replica_options(config, spec, resources)
    replicas = serve.deployment(ReplicaServer).options(name=REPLICA_DEPLOYMENT, **replica_options)
    ingress = serve.deployment(serve.ingress(application)(Ingress))
    gateway = ingress.options(name=GATEWAY_DEPLOYMENT, **_gateway_options(spec))
    bound = gateway.bind(replicas.bind(spec.with_threads(resources.threads)), config.attempts, spec.server)
    try:
        return serve.run(bound, name=config.app_name, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        reason = failure_reason(_replica_status(config.app_name) or str(error))
        raise ForetellError(f"the replicas did not start: {reason}") from None


def _replica_status(app_name: str) -> str:
    """Return Ray Serve's status message for an application's replicas."""
    from ray import serve

    app = serve.status().applications.get(app_name)
    if app is None or REPLICA_DEPLOYMENT not in app.deployments:
        return ""
    return str(app.deployments[REPLICA_DEPLOYMENT].message)


def _replica_options(config: ClusterConfig, spec: ReplicaSpec, resources: ReplicaResources) -> dict[str, Any]:
    from ray.serve.config import RequestRouterConfig

    scaling = config.scaling
    count = {"num_replicas": config.min_replicas} if scaling is None else {"autoscaling_config": scaling.ray_options()}
    return {
        **count,
        "max_ongoing_requests": spec.max_requests,
        "ray_actor_options": {"num_cpus": resources.cpus, "num_gpus": resources.gpus},
        "health_check_period_s": config.health_check_period,
        "health_check_timeout_s": config.health_check_timeout,
        "graceful_shutdown_timeout_s": spec.server.request_timeout,  # an update cuts off no response
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_SECONDS,
        "max_constructor_retry_count": MAX_START_FAILURES,
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"routing": config.routing, "slack": config.routing_slack},
        ),
    }


def _gateway_options(spec: ReplicaSpec) -> dict[str, Any]:
    return {
        "num_replicas": 1,
        "max_ongoing_requests": GATEWAY_MAX_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": spec.server.request_timeout + TIMEOUT_GRACE,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_SECONDS,
    }


def failure_reason(report: str) -> str:
    """Return the line of a traceback that names the error; our own errors without their class name."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("foretell.errors.")]
    candidates = ours or [line for line in lines if "Error: " in line] or lines
    return candidates[-1].partition(": ")[2] if ours else candidates[-1]


def url(host: str, port: int) -> str:
    """Return the HTTP URL of a host and port, with IPv6 addresses in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
