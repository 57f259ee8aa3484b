"""From settings to an application on Ray Serve, new or in the place of an older one."""

from __future__ import annotations

from typing import Any

from foretell.errors import ForetellError
from foretell.server.run import bind

from .config import ClusterConfig
from .gateway import GRACE, Ingress, application
from .replica import ReplicaServer
from .replica_spec import ReplicaResources, ReplicaSpec

ROUTER = "foretell.cluster.router.PrefixRouter"
REPLICAS, FRONT = "replica", "front"  # the names of the two deployments
MANY = 100_000  # requests that the front holds at once; each replica has its own limit
STARTS = 3  # times that a replica may fail to start before all is given up
LOOP = 0.5  # seconds between two looks whether a replica that leaves is idle


def open_port(host: str, port: int, keep_alive: int) -> int:
    """Start Ray Serve's listener, or find the one that runs; the port it listens on."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    running = _listener()
    if running is None:
        with bind(host, port) as found:  # a port that is taken shows at once, and a free one is found
            port = found.getsockname()[1]
        options = HTTPOptions(host=host, port=port, keep_alive_timeout_s=keep_alive)
        serve.start(proxy_location="HeadOnly", http_options=options)
        return port
    if running != (host, port) and port != 0:
        raise ForetellError(f"Ray Serve listens on {running[0]}:{running[1]} already; use that, or `serve shutdown`")
    return running[1]


def _listener() -> tuple[str, int] | None:
    """Where the Ray Serve of this cluster listens, if it runs."""
    from ray.serve._private.api import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        client: Any = _get_global_client(raise_if_no_controller_running=False)
    except RayServeException:
        return None
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def deploy(config: ClusterConfig, served: ReplicaSpec, room: ReplicaResources) -> Any:
    """Run the application, and wait until it answers; one that runs under this name is replaced replica by replica."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    replicas = serve.deployment(ReplicaServer).options(name=REPLICAS, **_replica_options(config, served, room))
    front = serve.deployment(serve.ingress(application)(Ingress)).options(name=FRONT, **_front_options(served))
    bound = front.bind(replicas.bind(served.with_threads(room.threads)), config.attempts, served.server)
    try:
        return serve.run(bound, name=config.app_name, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise ForetellError(f"the replicas did not start: {why(_told(config.app_name) or str(error))}") from None


def _told(name: str) -> str:
    """What Ray Serve says of an application's replicas."""
    from ray import serve

    app = serve.status().applications.get(name)
    return "" if app is None or REPLICAS not in app.deployments else str(app.deployments[REPLICAS].message)


def _replica_options(config: ClusterConfig, served: ReplicaSpec, room: ReplicaResources) -> dict[str, Any]:
    from ray.serve.config import RequestRouterConfig

    scaling = config.scaling
    count = {"num_replicas": config.min_replicas} if scaling is None else {"autoscaling_config": scaling.ray_options()}
    return {
        **count,
        "max_ongoing_requests": served.max_requests,
        "ray_actor_options": {"num_cpus": room.cpus, "num_gpus": room.gpus},
        "health_check_period_s": config.health_check_period,
        "health_check_timeout_s": config.health_check_timeout,
        "graceful_shutdown_timeout_s": served.server.request_timeout,  # nobody's answer is cut by an update
        "graceful_shutdown_wait_loop_s": LOOP,
        "max_constructor_retry_count": STARTS,
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"routing": config.routing, "slack": config.routing_slack},
        ),
    }


def _front_options(served: ReplicaSpec) -> dict[str, Any]:
    return {
        "num_replicas": 1,
        "max_ongoing_requests": MANY,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": served.server.request_timeout + GRACE,
        "graceful_shutdown_wait_loop_s": LOOP,
    }


def why(told: str) -> str:
    """The line of a report that says what happened."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("foretell.errors.")]
    found = ours or [line for line in lines if "Error: " in line] or lines
    return found[-1].partition(": ")[2] if ours else found[-1]


def shown_address(host: str, port: int) -> str:
    """As a browser takes it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
