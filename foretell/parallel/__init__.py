"""A model split over several processes: the first plans, the others run the same steps on their part."""

from .lead import lead
from .order import Order, held_bytes
from .team import Team

__all__ = ["Order", "Team", "held_bytes", "lead"]
