"""A model split over several processes: the first plans, the others run the same steps on their part."""

from .leader import lead
from .messages import LaunchSpec, ModelShardSpec, head_bytes, held_bytes
from .tp_group import TensorParallelGroup, check_ranks, ranks_words, start_team

__all__ = [
    "LaunchSpec",
    "ModelShardSpec",
    "TensorParallelGroup",
    "check_ranks",
    "head_bytes",
    "held_bytes",
    "lead",
    "ranks_words",
    "start_team",
]
