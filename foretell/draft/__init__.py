"""Ways to guess ahead. `build` is the one place that knows their names."""

from __future__ import annotations

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.models.variants import first_layers
from foretell.options import nearest
from foretell.runner.runner import ModelRunner

from .base import Drafter, NoDrafter
from .drawing import DraftTemperature
from .model import ModelDrafter
from .ngram import NGramDrafter
from .prediction import PredictionDrafter
from .shared import SharedDrafter
from .suffix import SuffixDrafter

NAMES = ("none", "ngram", "suffix", "prediction", "model:NAME", "exit:N", "auto")


def draft_model(config: SpeculationConfig) -> str | None:
    """The model a drafter wants for itself; a name that is not known is refused here, before anything is loaded."""
    kind, colon, argument = config.drafter.partition(":")
    if kind == "model":
        if not argument:
            raise RequestError("drafter", "model needs a draft model's name, as in model:smollm2-135m")
        return argument if config.budget else None
    if kind == "exit":
        if not argument.isdecimal() or int(argument) < 1:
            raise RequestError("drafter", "exit needs a number of layers, as in exit:8")
    elif colon or kind not in NAMES:
        raise RequestError("drafter", f"{config.drafter!r} is not known; {nearest(config.drafter, NAMES)}")
    return None


def build(config: SpeculationConfig, target: ModelRunner, helper: ModelRunner | None = None) -> Drafter:
    """The drafter a config names; `helper` runs the draft model it asked for."""
    vocab = target.model.config.vocab
    if config.budget == 0:
        return NoDrafter()
    sharpening: DraftTemperature = "entropy" if config.draft_temperature == "entropy" else "fixed"
    if helper is not None:
        return ModelDrafter(helper, vocab, config.drafter, sharpening)
    if config.drafter.startswith("exit:"):
        return SharedDrafter(_early(target, int(config.drafter[5:])), vocab, config.drafter, sharpening)
    if config.drafter == "suffix":
        return SuffixDrafter()
    if config.drafter == "prediction":
        return PredictionDrafter()
    return NGramDrafter(*config.match_lengths)


def _early(target: ModelRunner, layers: int) -> ModelRunner:
    most = target.model.config.layers - 1
    if layers > most:
        raise RequestError("drafter", f"exit:{layers} leaves nothing out; this model can exit after 1 to {most} layers")
    return target.lend(first_layers(target.model, layers))
