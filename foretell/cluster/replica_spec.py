"""The settings of a replica, and the CPU cores and GPUs it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foretell.cluster.config import ClusterConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import CapacityError, RequestError
from foretell.server.config import ServerConfig


@dataclass(frozen=True)
class ReplicaSpec:
    """The server, engine and speculation settings of every replica; frozen, so that Ray can send them."""

    server: ServerConfig
    engine: EngineConfig
    speculation: SpeculationConfig

    @property
    def names(self) -> tuple[str, ...]:
        return self.server.served_model_name or (self.engine.model,)

    @property
    def max_requests(self) -> int:
        """Return the most running and waiting sequences of one replica."""
        return self.engine.max_num_seqs + self.server.max_queue

    def num_gpus(self, any_there: bool) -> int:
        """Return the GPUs of one replica: one per rank, and enough for the device of the draft model."""
        device, draft_device = self.engine.device, (self.speculation.draft_device or "").partition(":")
        on_gpus = device.startswith("cuda") or (device == "auto" and any_there)
        num_for_draft = int(draft_device[2]) + 1 if draft_device[2].isdigit() else 1
        num_ranks = self.engine.tensor_parallel_size if on_gpus else 0
        return max(num_ranks, num_for_draft if draft_device[0] == "cuda" else 0)

    def with_threads(self, threads: int) -> ReplicaSpec:
        """Return the spec with this number of threads, unless one was set."""
        if self.engine.threads is not None:
            return self
        return replace(self, engine=replace(self.engine, threads=threads))


@dataclass(frozen=True)
class ReplicaResources:
    """The resources that Ray reserves for one replica."""

    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))

    def __str__(self) -> str:
        parts = [f"{_count(self.gpus, 'GPU')} and"] if self.gpus else []
        return " ".join([*parts, _count(self.cpus, "core")])


def plan_resources(config: ClusterConfig, spec: ReplicaSpec, available: Mapping[str, float]) -> ReplicaResources:
    """Return the resources of each replica out of those `available` (CPU, GPU); raise if they do not suffice."""
    cores, cards = available.get("CPU", 0), available.get("GPU", 0)
    ranks, gpus = spec.engine.tensor_parallel_size, config.replica_gpus
    if gpus is None:
        gpus = spec.num_gpus(any_there=cards > 0)
    elif ranks > 1 and 0 < gpus < ranks and spec.engine.device != "cpu":
        raise RequestError("replica_gpus", f"{gpus:g} is too few: each of the {ranks} ranks needs one; leave it out")
    cpus = config.replica_cpus
    if cpus is None:
        cpus = ranks if gpus else max(1, cores // config.max_replicas)  # with GPUs, a core for each rank's process
    _check_available(config.max_replicas, gpus, cards, "GPU", "replica_gpus")
    _check_available(config.max_replicas, cpus, cores, "core", "replica_cpus")
    return ReplicaResources(cpus, gpus)


def _check_available(replicas: int, each: float, available: float, unit: str, option: str) -> None:
    if replicas * each <= available:
        return
    subject = f"{_count(replicas, 'replica')} of {_count(each, unit)}"
    needs = f"need{'s' if replicas == 1 else ''} {replicas * each:g}"
    raise CapacityError(f"{subject} {needs}; {available:g} are available: lower replicas or {option}")


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'s' if number > 1 else ''}"
