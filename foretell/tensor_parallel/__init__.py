"""A model split over several processes: the first plans, the others run the same steps on their part."""

from .launch import check_ranks, ranks_words, start_team
from .leader import lead
from .messages import Order, Part, head_bytes, held_bytes
from .tp_group import Team

__all__ = [
    "Order",
    "Part",
    "Team",
    "check_ranks",
    "head_bytes",
    "held_bytes",
    "lead",
    "ranks_words",
    "start_team",
]
