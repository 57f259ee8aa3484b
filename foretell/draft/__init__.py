"""Ways to guess ahead, by name. A config names one, several to choose from, or leaves it open with `auto`."""

from __future__ import annotations

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.models.quantize import Bits

from .base import Drafter, NoDrafter
from .mix import MixDrafter
from .registry import Helper, Kind, Parts, find_kind, make

__all__ = ["Drafter", "Helper", "Kind", "Parts", "arms", "build", "copies_wanted", "models_wanted"]

AUTO = ("ngram", "suffix", "recycle")  # what needs no model, costs no memory to speak of, and is asked for nothing
WITH_REQUEST = "prediction"  # of use to requests that bring one, so that it is always there


def arms(config: SpeculationConfig) -> tuple[str, ...]:
    """The drafters a config names; one that is not known is refused here, before anything is loaded."""
    found: list[str] = []
    for name in (part.strip() for part in config.drafter.split(",")):
        found += AUTO if name in ("auto", "mix") else [name]
    if "none" in found:
        if len(found) > 1:
            raise RequestError("drafter", "none stands alone; leave it out, or the others")
        return ()
    for name in found:
        kind, _, argument = name.partition(":")
        find_kind(kind).check(argument)
    return tuple(dict.fromkeys(found)) if config.budget else ()


def models_wanted(config: SpeculationConfig) -> tuple[str, ...]:
    """The draft models that have to be loaded."""
    return tuple(name.partition(":")[2] for name in arms(config) if name.startswith("model:"))


def copies_wanted(config: SpeculationConfig) -> tuple[Bits, ...]:
    """In how many bits the target's own weights are wanted again."""
    named = [name for name in arms(config) if name.startswith("self:")]
    return tuple(8 if name == "self:int8" else 4 for name in named)


def build(parts: Parts) -> Drafter:
    """The drafters a config names, behind one."""
    named = arms(parts.config)
    if not named:
        return NoDrafter()
    return MixDrafter([make(parts, name) for name in dict.fromkeys((*named, WITH_REQUEST))], named)
