"""Drafters by name. A config names one, several to choose from, or leaves the choice open with `auto`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.models.draft_heads.loading import head_kind
from foretell.models.quantize import QuantFormat

from .base import Drafter
from .idle_unload import UnloadableDrafter
from .load import Loader, Planner, copy_format, draft_model_of, drop_unaffordable
from .mix import MergedDrafter, MixDrafter
from .registry import KINDS, DrafterKind, DrafterParts, LoadedDraftModel, PlacedHead, find_kind, is_head, make

__all__ = [
    "Drafter",
    "LoadedDraftModel",
    "DrafterKind",
    "Loader",
    "DrafterParts",
    "PlacedHead",
    "build",
    "copies_wanted",
    "default_drafters",
    "drafter_names",
    "fit_to_memory",
    "heads_wanted",
    "merged_parts",
    "models_wanted",
]

AUTO = ("ngram", "suffix", "recycle")  # free drafters: no model, and next to no memory
ON_REQUEST = ("ngram",)  # of these, drafts only if a request names it: suffix finds the same and knows its confidence
CORPUS = "corpus"  # drafts from the files of `draft_corpus`, if there are any
PREDICTION = "prediction"  # always present: it drafts for requests that bring a prediction


def drafter_names(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the drafters that a config names; raise for an unknown one before anything is loaded."""
    found: list[str] = []
    for name in (part.strip() for part in config.drafter.split(",")):
        found += AUTO if name in ("auto", "mix") else [*merged_parts(name), _with_head_kind(name)]
    if CORPUS in found and not config.draft_corpus:
        raise RequestError("drafter", f"{CORPUS} needs files; name them with --draft-corpus FOLDER")
    if "none" in found:
        if len(found) > 1:
            raise RequestError("drafter", "none cannot be combined with other drafters; leave out one or the other")
        if config.draft_corpus:
            raise RequestError("draft_corpus", "has no effect with --drafter none; leave one of them out")
        return ()
    if config.draft_corpus and CORPUS not in found:  # before drafters that defer to a confident one
        found.insert(max((found.index(name) + 1 for name in ("ngram", "suffix") if name in found), default=0), CORPUS)
    for name in found:
        kind, _, argument = name.partition(":")
        if not merged_parts(name):
            find_kind(kind).check(argument)
    return tuple(dict.fromkeys(found)) if config.budget else ()


def merged_parts(name: str) -> tuple[str, ...]:
    """Return the drafters whose drafts are merged under a name `a+b`, or () for a single drafter."""
    parts = tuple(part.strip() for part in name.split("+"))
    known = all(part.partition(":")[0] in KINDS for part in parts)
    return parts if len(parts) > 1 and known else ()


def _single_drafters(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the drafters of a config that are not merged from others."""
    return tuple(name for name in drafter_names(config) if not merged_parts(name))


def default_drafters(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the drafters of a request that names none."""
    named = [part.strip() for part in config.drafter.split(",")]
    inside = {part for name in named for part in merged_parts(name)}
    return tuple(name for name in drafter_names(config) if name in named or name not in {*ON_REQUEST, *inside})


def _with_head_kind(name: str) -> str:
    """Return the drafter of a folder with a head in it, alone or given as a draft model; other names unchanged."""
    folder = Path(os.path.expanduser(name.removeprefix("model:")))
    kind = head_kind(folder) if os.path.isdir(folder) else None
    return name if kind is None else f"{kind}:{folder}"


def models_wanted(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the draft models to load."""
    return tuple(model for name in _single_drafters(config) if (model := draft_model_of(name)) is not None)


def heads_wanted(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the drafters whose heads have to be loaded."""
    return tuple(name for name in _single_drafters(config) if is_head(name))


def copies_wanted(config: SpeculationConfig) -> tuple[QuantFormat, ...]:
    """Return the format of each quantized copy of the target that is wanted."""
    return tuple(copy_format(name) for name in _single_drafters(config) if name.startswith("self:"))


def fit_to_memory(config: SpeculationConfig, plan: Planner) -> SpeculationConfig:
    """Return the config without drafters that do not fit; `plan` plans the memory or raises `CapacityError`."""
    names = drafter_names(config)
    return drop_unaffordable(config, names, tuple(name for name in names if _is_heavy(name)), plan)


def build(parts: DrafterParts, reload: Callable[[str], DrafterParts] | None = None) -> MixDrafter:
    """Build the drafters that a config names. `reload` loads the parts of one of them again after an idle unload."""
    named = drafter_names(parts.config)
    if not named:
        return MixDrafter([])
    single = [make(parts, name) for name in dict.fromkeys((*_single_drafters(parts.config), PREDICTION))]
    idle = parts.config.draft_idle_unload
    if idle is not None and reload is not None:
        single = [_unloadable(each, reload, idle) if _can_unload(each.name) else each for each in single]
    by_name = {drafter.name: drafter for drafter in single}
    merged = [
        MergedDrafter(name, [by_name[part] for part in merged_parts(name)]) for name in named if merged_parts(name)
    ]
    return MixDrafter([*single, *merged], default_drafters(parts.config))


def _unloadable(drafter: Drafter, reload: Callable[[str], DrafterParts], idle: float) -> UnloadableDrafter:
    name = drafter.name
    return UnloadableDrafter(drafter, lambda: make(reload(name), name), idle)


def _is_heavy(name: str) -> bool:
    parts = merged_parts(name)
    return any(map(_is_heavy, parts)) if parts else find_kind(name.partition(":")[0]).is_heavy


def _can_unload(name: str) -> bool:
    """Return whether a drafter may be unloaded; not a head, whose KV would be lost with its weights."""
    kind = find_kind(name.partition(":")[0])
    return kind.is_heavy and kind.can_unload
