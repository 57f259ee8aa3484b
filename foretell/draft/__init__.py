"""Ways to guess ahead. `build` is the one place that knows their names."""

from __future__ import annotations

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest

from .base import Drafter, NoDrafter
from .ngram import NGramDrafter

NAMES = ("none", "ngram", "auto")


def build(config: SpeculationConfig) -> Drafter:
    """The drafter a config names."""
    if config.drafter == "none" or config.budget == 0:
        return NoDrafter()
    if config.drafter in ("ngram", "auto"):
        return NGramDrafter(*config.match_lengths)
    raise RequestError("drafter", f"{config.drafter!r} is not known; {nearest(config.drafter, NAMES)}")
