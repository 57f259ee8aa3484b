"""A model split over several processes: the first plans, the others run the same steps on their part."""

from .leading import lead
from .order import Order, Part, head_bytes, held_bytes
from .starting import check_ranks, ranks_words, start_team
from .team import Team

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
