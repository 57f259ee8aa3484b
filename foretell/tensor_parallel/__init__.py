"""Tensor parallelism over processes: the leader schedules, the workers run the same steps on their shards."""

from .leader import make_leader
from .messages import LaunchSpec, ModelShardSpec, head_bytes, weight_bytes
from .tp_group import TensorParallelGroup, check_ranks, describe_ranks, launch_workers

__all__ = [
    "LaunchSpec",
    "ModelShardSpec",
    "TensorParallelGroup",
    "check_ranks",
    "head_bytes",
    "weight_bytes",
    "make_leader",
    "describe_ranks",
    "launch_workers",
]
