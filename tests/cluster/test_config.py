"""Replica settings and their error messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretell.cluster.config import ClusterConfig
from foretell.cluster.replica_spec import ReplicaResources, ReplicaSpec, plan_resources
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import CapacityError, RequestError
from foretell.server.config import ServerConfig


def test_replicas_or_autoscaling() -> None:
    assert not ClusterConfig().enabled
    assert (ClusterConfig(replicas=3).min_replicas, ClusterConfig(replicas=3).max_replicas) == (3, 3)
    scaled = ClusterConfig(autoscaling=json.dumps({"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 3}))
    assert (scaled.enabled, scaled.min_replicas, scaled.max_replicas) == (True, 2, 5)
    assert scaled.scaling is not None
    options = scaled.scaling.ray_options()
    assert options["target_ongoing_requests"] == 3 and "upscaling_factor" not in options


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 0}, "replicas: must be 1 or more"),
    ({"replicas": 2, "autoscaling": "{}"}, "give one"),
    ({"autoscaling": "{"}, "is not JSON"),
    ({"autoscaling": "3"}, "must be an object"),
    ({"autoscaling": '{"max_replica": 3}'}, "did you mean 'max_replicas'"),
    ({"autoscaling": '{"min_replicas": 3, "max_replicas": 2}'}, "min_replicas <= max_replicas"),
    ({"autoscaling": '{"max_replicas": 2, "initial_replicas": 3}'}, "initial_replicas between"),
    ({"autoscaling": '{"target_ongoing_requests": 0.0}'}, "target_ongoing_requests above 0"),
    ({"autoscaling": '{"max_replicas": "two"}'}, "must be an integer"),
    ({"replica_cpus": 0.0}, "replica_cpus: must be above 0"),
    ({"replica_gpus": -1.0}, "replica_gpus: must be 0 or more"),
    ({"routing": "any"}, "routing: must be prefix"),
    ({"routing_slack": -1}, "routing_slack"),
    ({"attempts": 0}, "attempts"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_invalid_settings_are_explained(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ClusterConfig(**given)


def on(device: str, ranks: int = 1, draft_device: str | None = None) -> ReplicaSpec:
    engine = EngineConfig(device=device, tensor_parallel_size=ranks)
    return ReplicaSpec(ServerConfig(), engine, SpeculationConfig(draft_device=draft_device))


def test_each_replica_gets_its_share_of_the_cores() -> None:
    assert plan_resources(ClusterConfig(replicas=2), on("auto"), {"CPU": 8}) == ReplicaResources(4, 0)
    assert plan_resources(ClusterConfig(replicas=3), on("auto"), {"CPU": 8}) == ReplicaResources(2, 0)
    assert plan_resources(
        ClusterConfig(replicas=2, replica_cpus=3.0), on("cpu"), {"CPU": 8, "GPU": 2}
    ) == ReplicaResources(3, 0)
    assert plan_resources(ClusterConfig(replicas=2), on("auto"), {"CPU": 8, "GPU": 2}) == ReplicaResources(1, 1)
    assert plan_resources(
        ClusterConfig(replicas=2, replica_gpus=0.5), on("cuda"), {"CPU": 8, "GPU": 1}
    ) == ReplicaResources(1, 0.5)
    assert plan_resources(ClusterConfig(replicas=1, replica_cpus=0.5), on("auto"), {"CPU": 1}).threads == 1


def test_more_replicas_than_cores_or_gpus() -> None:
    with pytest.raises(CapacityError, match="3 replicas of 1 core need 3; 2 are available"):
        plan_resources(ClusterConfig(replicas=3), on("auto"), {"CPU": 2})
    with pytest.raises(CapacityError, match="2 replicas of 2 cores need 4; 2 are available"):
        plan_resources(ClusterConfig(replicas=2, replica_cpus=2.0), on("auto"), {"CPU": 2})
    with pytest.raises(CapacityError, match="4 replicas of 1 GPU need 4; 2 are available"):
        plan_resources(ClusterConfig(replicas=4), on("auto"), {"CPU": 64, "GPU": 2})
    with pytest.raises(CapacityError, match="1 replica of 1 GPU needs 1; 0 are available"):
        plan_resources(ClusterConfig(replicas=1), on("cuda"), {"CPU": 64})
    scaled = ClusterConfig(autoscaling='{"min_replicas": 1, "max_replicas": 2}')
    with pytest.raises(CapacityError, match="lower replicas"):
        plan_resources(scaled, on("auto"), {"CPU": 1})


def test_each_rank_of_a_replica_gets_a_gpu() -> None:
    there = {"CPU": 64, "GPU": 8}
    two = ClusterConfig(replicas=2)
    assert plan_resources(two, on("auto", ranks=4), there) == ReplicaResources(4, 4)
    assert plan_resources(two, on("cuda", ranks=2), there) == ReplicaResources(2, 2)
    assert plan_resources(two, on("cpu", ranks=4), there) == ReplicaResources(32, 0)
    assert plan_resources(two, on("auto", ranks=4), {"CPU": 64}) == ReplicaResources(32, 0)
    assert plan_resources(ClusterConfig(replicas=1), on("cuda", 4, "cuda:4"), there) == ReplicaResources(4, 5), (
        "and the draft its own"
    )
    assert plan_resources(two, on("cuda", 1, "cuda:1"), there) == ReplicaResources(1, 2)
    assert plan_resources(two, on("cpu", 1, "cuda"), there) == ReplicaResources(1, 1)
    with pytest.raises(CapacityError, match="4 replicas of 4 GPUs need 16; 8 are available"):
        plan_resources(ClusterConfig(replicas=4), on("auto", ranks=4), there)
    with pytest.raises(RequestError, match="each of the 4 ranks needs one"):
        plan_resources(ClusterConfig(replicas=2, replica_gpus=1.0), on("auto", ranks=4), there)
