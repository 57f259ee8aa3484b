"""How many replicas, what each of them gets, and which of them a request goes to: frozen, checked, declared once."""

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
    """More replicas while many requests are under way, fewer when they are gone; Ray Serve's own words."""

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
            least_is_zero = f.name.endswith("delay_s")
            if isinstance(value, float) and not (0 < value < math.inf or (least_is_zero and value == 0)):
                raise RequestError("autoscaling", f"needs a {f.name} above 0, not {value}")

    @classmethod
    def from_json(cls, text: str) -> Autoscaling:
        """From JSON; a name that is not known gets the nearest right one."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise RequestError("autoscaling", f"is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise RequestError("autoscaling", 'must be an object such as {"max_replicas": 4}')
        known = [f.name for f in fields(cls)]
        for name in found:
            if name not in known:
                raise RequestError(f"autoscaling.{name}", f"is not known; {nearest(name, known)}")
        return cls(**found)

    def ray_options(self) -> dict[str, Any]:
        """As Ray Serve takes it; what was left out is left to it."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@strict
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas of one model."""

    replicas: int | None = option(None, "serve so many copies of the model on Ray, each with its own cores or GPUs")
    autoscaling: str | None = option(
        None, 'instead: as many as requests need, such as {"min_replicas": 1, "max_replicas": 4}; as in Ray Serve'
    )
    replica_cpus: float | None = option(
        None, "cores of a replica (default: its share of the cores; beside GPUs one for each rank)"
    )
    replica_gpus: float | None = option(None, "GPUs of a replica (default: one for each rank, where there are any)")
    routing: str = option(
        "prefix",
        "which replica a request goes to: the one that has read its beginning, or the least loaded, or any",
        choices=ROUTINGS,
    )
    routing_slack: int = option(
        4, "requests by which a replica may be busier than the least loaded and still get those it has read"
    )
    attempts: int = option(3, "replicas a request is tried on, as long as nothing of the answer was sent")
    address: str | None = option(
        None, "a Ray cluster: HOST:PORT or auto (default: RAY_ADDRESS, or a Ray of its own)", aliases=("--ray-address",)
    )
    app_name: str = option("foretell", "the name of the application on Ray; the same name again is an update")
    health_check_period: float = option(5.0, "seconds between two looks at a replica's health")
    health_check_timeout: float = option(30.0, "seconds after which a replica that does not answer is replaced")
    dashboard: bool = option(False, "start Ray's dashboard too, where Ray is started")

    def __post_init__(self) -> None:
        if self.replicas is not None and self.replicas < 1:
            raise RequestError("replicas", f"must be 1 or more, not {self.replicas}")
        if self.replicas is not None and self.autoscaling is not None:
            raise RequestError("replicas", "is given, and autoscaling too; give one")
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
        """Whether replicas are wanted at all."""
        return self.replicas is not None or self.autoscaling is not None

    @property
    def min_replicas(self) -> int:
        """Replicas there are from the start."""
        scaling = self.scaling
        if scaling is None:
            return self.replicas or 1
        return scaling.initial_replicas or scaling.min_replicas

    @property
    def max_replicas(self) -> int:
        """Replicas there may ever be."""
        scaling = self.scaling
        return self.min_replicas if scaling is None else scaling.max_replicas
