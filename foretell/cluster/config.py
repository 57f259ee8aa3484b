"""Settings of a deployment with replicas: their number, resources and routing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest, option, strict

ROUTINGS = ("prefix", "least_loaded", "random")


@strict
@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Ray Serve's autoscaling settings, under Ray Serve's names."""

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing_requests: float = 8.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    metrics_interval_s: float = 5.0
    look_back_period_s: float = 15.0
    upscaling_factor: float | None = None
    downscaling_factor: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise RequestError(
                "autoscaling", f"needs 1 <= min_replicas <= max_replicas, not {self.min_replicas}, {self.max_replicas}"
            )
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise RequestError("autoscaling", "needs initial_replicas between min_replicas and max_replicas")
        for f in fields(self):
            value = getattr(self, f.name)
            may_be_zero = f.name.endswith("delay_s")
            if isinstance(value, float) and not (0 < value < math.inf or (may_be_zero and value == 0)):
                raise RequestError("autoscaling", f"needs a {f.name} above 0, not {value}")

    @classmethod
    def from_json(cls, text: str) -> Autoscaling:
        """Parse JSON; the error for an unknown name suggests the nearest known one."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise RequestError("autoscaling", f"is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise RequestError("autoscaling", 'must be an object such as {"max_replicas": 4}')
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(f"autoscaling.{name}", f"is not known; {nearest(name, known)}")
        return cls(**value)

    def ray_options(self) -> dict[str, Any]:
        """Return the settings for Ray Serve; those left out keep its defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@strict
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The options of `foretell serve --replicas` and `foretell deploy`."""

    replicas: int | None = option(None, "number of model replicas on Ray, each with its own cores or GPUs", common=True)
    autoscaling: str | None = option(
        None, 'instead of --replicas: Ray Serve autoscaling, such as {"min_replicas": 1, "max_replicas": 4}'
    )
    replica_cpus: float | None = option(
        None, "CPU cores per replica (default: an equal part of all cores; with GPUs, one per rank)"
    )
    replica_gpus: float | None = option(None, "GPUs per replica (default: one per rank if there are GPUs)")
    routing: str = option(
        "prefix",
        "routing policy: the replica with the longest cached prefix, the least loaded, or a random one",
        choices=ROUTINGS,
    )
    routing_slack: int = option(
        4, "how many more requests than the least loaded a replica may have and still be preferred for its prefix cache"
    )
    attempts: int = option(3, "attempts per request on different replicas, before the first byte of the response")
    address: str | None = option(
        None, "Ray cluster: HOST:PORT or auto (default: RAY_ADDRESS, or a new local one)", aliases=("--ray-address",)
    )
    app_name: str = option("foretell", "name of the application on Ray; deploying the same name again updates it")
    health_check_period: float = option(5.0, "seconds between two health checks of a replica")
    health_check_timeout: float = option(30.0, "seconds after which an unresponsive replica is replaced")
    dashboard: bool = option(False, "start Ray's dashboard if Ray is started")

    def __post_init__(self) -> None:
        if self.replicas is not None and self.replicas < 1:
            raise RequestError("replicas", f"must be 1 or more, not {self.replicas}")
        if self.replicas is not None and self.autoscaling is not None:
            raise RequestError("replicas", "and autoscaling are mutually exclusive; give one")
        for name in ("replica_cpus", "health_check_period", "health_check_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, f"must be above 0, not {value}")
        if self.replica_gpus is not None and not 0 <= self.replica_gpus < math.inf:
            raise RequestError("replica_gpus", f"must be 0 or more, not {self.replica_gpus}")
        if self.routing not in ROUTINGS:
            raise RequestError("routing", f"must be {', '.join(ROUTINGS)}; not {self.routing!r}")
        if self.routing_slack < 0:
            raise RequestError("routing_slack", f"must be 0 or more, not {self.routing_slack}")
        if self.attempts < 1:
            raise RequestError("attempts", f"must be 1 or more, not {self.attempts}")
        _ = self.scaling

    @property
    def scaling(self) -> Autoscaling | None:
        return None if self.autoscaling is None else Autoscaling.from_json(self.autoscaling)

    @property
    def enabled(self) -> bool:
        """Return whether replicas are requested at all."""
        return self.replicas is not None or self.autoscaling is not None

    @property
    def min_replicas(self) -> int:
        """Return the initial number of replicas."""
        scaling = self.scaling
        if scaling is None:
            return self.replicas or 1
        return scaling.initial_replicas or scaling.min_replicas

    @property
    def max_replicas(self) -> int:
        """Return the largest number of replicas."""
        scaling = self.scaling
        return self.min_replicas if scaling is None else scaling.max_replicas
