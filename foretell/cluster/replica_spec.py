"""What every replica serves, as it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foretell.cluster.config import ClusterConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import CapacityError, RequestError
from foretell.server.config import ServerConfig


@dataclass(frozen=True)
class ReplicaSpec:
    """A server's settings; frozen, so that they can be sent to where a replica starts."""

    server: ServerConfig
    engine: EngineConfig
    speculation: SpeculationConfig

    @property
    def names(self) -> tuple[str, ...]:
        return self.server.served_model_name or (self.engine.model,)

    @property
    def max_requests(self) -> int:
        """That one replica writes or lets wait."""
        return self.engine.max_num_seqs + self.server.max_queue

    def num_gpus(self, any_there: bool) -> int:
        """Of one copy: one for each rank, and up to the one that the draft model has for itself."""
        device, beside = self.engine.device, (self.speculation.draft_device or "").partition(":")
        on_gpus = device.startswith("cuda") or (device == "auto" and any_there)
        last = int(beside[2]) + 1 if beside[2].isdigit() else 1
        return max(self.engine.tensor_parallel_size if on_gpus else 0, last if beside[0] == "cuda" else 0)

    def with_threads(self, threads: int) -> ReplicaSpec:
        """With the threads of a replica, where none were asked for."""
        if self.engine.threads is not None:
            return self
        return replace(self, engine=replace(self.engine, threads=threads))


@dataclass(frozen=True)
class ReplicaResources:
    """What Ray sets aside for one replica."""

    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))

    def __str__(self) -> str:
        parts = [f"{_some(self.gpus, 'GPU')} and"] if self.gpus else []
        return " ".join([*parts, _some(self.cpus, "core")])


def plan_resources(config: ClusterConfig, served: ReplicaSpec, there: Mapping[str, float]) -> ReplicaResources:
    """What each replica gets of what is `there`, in Ray's words (CPU, GPU); refused where it is too little for all."""
    cores, cards = there.get("CPU", 0), there.get("GPU", 0)
    ranks, gpus = served.engine.tensor_parallel_size, config.replica_gpus
    if gpus is None:
        gpus = served.num_gpus(any_there=cards > 0)
    elif ranks > 1 and 0 < gpus < ranks and served.engine.device != "cpu":
        raise RequestError("replica_gpus", f"{gpus:g} is too little: each of the {ranks} ranks needs one; leave it out")
    cpus = config.replica_cpus
    if cpus is None:
        cpus = ranks if gpus else max(1, cores // config.max_replicas)  # beside a GPU, a core for each process
    _check(config.max_replicas, gpus, cards, "GPU", "replica_gpus")
    _check(config.max_replicas, cpus, cores, "core", "replica_cpus")
    return ReplicaResources(cpus, gpus)


def _check(replicas: int, each: float, there: float, what: str, name: str) -> None:
    if replicas * each <= there:
        return
    who = f"{_some(replicas, 'replica')} of {_some(each, what)}"
    needs = f"need{'s' if replicas == 1 else ''} {replicas * each:g}"
    raise CapacityError(f"{who} {needs}; there are {there:g}: lower replicas or {name}")


def _some(count: float, what: str) -> str:
    return f"{count:g} {what}{'s' if count > 1 else ''}"
