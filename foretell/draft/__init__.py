"""Ways to guess ahead. `build` is the one place that knows their names."""

from __future__ import annotations

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest
from foretell.runner.runner import ModelRunner

from .base import Drafter, NoDrafter
from .drawing import DraftTemperature
from .model import ModelDrafter
from .ngram import NGramDrafter

NAMES = ("none", "ngram", "model:NAME", "auto")


def draft_model(config: SpeculationConfig) -> str | None:
    """The model a drafter wants for itself; a name that is not known is refused here, before anything is loaded."""
    kind, colon, name = config.drafter.partition(":")
    if kind == "model":
        if not name:
            raise RequestError("drafter", "model needs a draft model's name, as in model:smollm2-135m")
        return name if config.budget else None
    if colon or kind not in NAMES:
        raise RequestError("drafter", f"{config.drafter!r} is not known; {nearest(config.drafter, NAMES)}")
    return None


def build(config: SpeculationConfig, vocab: int, runner: ModelRunner | None = None) -> Drafter:
    """The drafter a config names, for a target of `vocab` tokens; `runner` runs the draft model it asked for."""
    if config.budget == 0:
        return NoDrafter()
    if runner is not None:
        sharpening: DraftTemperature = "entropy" if config.draft_temperature == "entropy" else "fixed"
        return ModelDrafter(runner, vocab, config.drafter, sharpening)
    return NGramDrafter(*config.match_lengths)
