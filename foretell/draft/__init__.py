"""Ways to guess ahead, by name. A config names one, several to choose from, or leaves it open with `auto`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.models.draft_heads.loading import head_kind
from foretell.models.quantize import QuantFormat

from .base import Drafter, NoDrafter
from .idle_unload import UnloadableDrafter
from .load import Loader, Planner, copy_format, fit, helper_of
from .mix import MixDrafter
from .registry import KINDS, DrafterKind, DrafterParts, LoadedDraftModel, PlacedHead, find_kind, is_head, make
from .tree_merge import MergedDrafter

__all__ = [
    "Drafter",
    "LoadedDraftModel",
    "DrafterKind",
    "Loader",
    "DrafterParts",
    "PlacedHead",
    "arms",
    "build",
    "copies_wanted",
    "defaults",
    "fitted",
    "heads_wanted",
    "models_wanted",
    "parts_of",
]

AUTO = ("ngram", "suffix", "recycle")  # what needs no model, costs no memory to speak of, and is asked for nothing
ON_REQUEST = ("ngram",)  # of those who guesses only where it is named: suffix finds the same, and knows how sure it is
WITH_REQUEST = "prediction"  # of use to requests that bring one, so that it is always there


def arms(config: SpeculationConfig) -> tuple[str, ...]:
    """The drafters a config names; one that is not known is refused here, before anything is loaded."""
    found: list[str] = []
    for name in (part.strip() for part in config.drafter.split(",")):
        found += AUTO if name in ("auto", "mix") else [*parts_of(name), _recognised(name)]
    if "none" in found:
        if len(found) > 1:
            raise RequestError("drafter", "none stands alone; leave it out, or the others")
        return ()
    for name in found:
        kind, _, argument = name.partition(":")
        if not parts_of(name):
            find_kind(kind).check(argument)
    return tuple(dict.fromkeys(found)) if config.budget else ()


def parts_of(name: str) -> tuple[str, ...]:
    """The drafters whose guesses become one tree under this name, `a+b`; none where it is a single one."""
    parts = tuple(part.strip() for part in name.split("+"))
    known = all(part.partition(":")[0] in KINDS for part in parts)
    return parts if len(parts) > 1 and known else ()


def _single(config: SpeculationConfig) -> tuple[str, ...]:
    """The drafters that guess themselves."""
    return tuple(name for name in arms(config) if not parts_of(name))


def defaults(config: SpeculationConfig) -> tuple[str, ...]:
    """Of these the ones a request gets that names none."""
    named = [part.strip() for part in config.drafter.split(",")]
    inside = {part for name in named for part in parts_of(name)}
    return tuple(arm for arm in arms(config) if arm in named or arm not in {*ON_REQUEST, *inside})


def _recognised(name: str) -> str:
    """A folder with a head in it, alone or given as a draft model, by its drafter's name; other names as they are."""
    folder = Path(os.path.expanduser(name.removeprefix("model:")))
    kind = head_kind(folder) if os.path.isdir(folder) else None
    return name if kind is None else f"{kind}:{folder}"


def models_wanted(config: SpeculationConfig) -> tuple[str, ...]:
    """The draft models that have to be loaded."""
    return tuple(helper for name in _single(config) if (helper := helper_of(name)) is not None)


def heads_wanted(config: SpeculationConfig) -> tuple[str, ...]:
    """The drafters whose heads have to be loaded."""
    return tuple(name for name in _single(config) if is_head(name))


def copies_wanted(config: SpeculationConfig) -> tuple[QuantFormat, ...]:
    """Return the formats of the quantized copies of the target that the drafters need."""
    return tuple(copy_format(name) for name in _single(config) if name.startswith("self:"))


def fitted(config: SpeculationConfig, plan: Planner) -> SpeculationConfig:
    """The config without the drafters that there is no memory for; `plan` counts it, or refuses."""
    names = arms(config)
    return fit(config, names, tuple(name for name in names if _is_heavy(name)), plan)


def build(parts: DrafterParts, again: Callable[[str], DrafterParts] | None = None) -> Drafter:
    """The drafters a config names, behind one. `again` loads what one of them is made of once more."""
    named = arms(parts.config)
    if not named:
        return NoDrafter()
    made = [make(parts, name) for name in dict.fromkeys((*_single(parts.config), WITH_REQUEST))]
    idle = parts.config.draft_idle_unload
    if idle is not None and again is not None:
        made = [_resident(drafter, again, idle) if _rests(drafter.name) else drafter for drafter in made]
    by_name = {drafter.name: drafter for drafter in made}
    several = [MergedDrafter(name, [by_name[part] for part in parts_of(name)]) for name in named if parts_of(name)]
    return MixDrafter([*made, *several], defaults(parts.config))


def _resident(drafter: Drafter, again: Callable[[str], DrafterParts], idle: float) -> UnloadableDrafter:
    name = drafter.name
    return UnloadableDrafter(drafter, lambda: make(again(name), name), idle)


def _is_heavy(name: str) -> bool:
    parts = parts_of(name)
    return any(map(_is_heavy, parts)) if parts else find_kind(name.partition(":")[0]).heavy


def _rests(name: str) -> bool:
    """What a head has read is lost with its weights' memory, so that it stays."""
    kind = find_kind(name.partition(":")[0])
    return kind.heavy and kind.rests
