"""Loads the weights of drafters, at start-up and again after an idle unload, and drops drafters that do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from foretell.config import SpeculationConfig
from foretell.draft.corpus.drafter import IndexedCorpus
from foretell.draft.cross_tokenizer.vocab_map import VocabMap
from foretell.draft.model import MAX_ROWS
from foretell.draft.registry import DrafterParts, LoadedDraftModel, PlacedHead, is_head
from foretell.errors import CapacityError
from foretell.models.decoder import Decoder
from foretell.models.quantize import QuantFormat, quantized_copy
from foretell.runner.memory_plan import GIB, MemoryPlan, device_memory
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer

LOG = logging.getLogger("foretell")

Planner = Callable[[SpeculationConfig], MemoryPlan]


class LoadableModel(Protocol):
    """A model that can be loaded."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def loading_bytes(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def copy_bytes(self, format: QuantFormat) -> int: ...
    def load(self) -> Decoder: ...


@dataclass(frozen=True)
class Loader:
    """Loads draft models and quantized copies of the target."""

    config: SpeculationConfig
    target: LoadableModel
    runner: ModelRunner  # the target's
    draft_models: Mapping[str, LoadableModel]
    vocab_maps: Mapping[str, VocabMap | None]  # of draft models with another tokenizer
    run: Callable[[str], ModelRunner]  # loads a draft model into a runner with pages for `tokens` tokens
    tokens: int
    heads: Mapping[str, PlacedHead] = field(default_factory=dict)
    max_rows: int = MAX_ROWS  # of one forward of a draft model
    corpus: IndexedCorpus | None = None  # files to draft from

    def parts(self, models: Iterable[str], copies: Mapping[QuantFormat, Decoder]) -> DrafterParts:
        """Load these draft models and return the parts of drafters."""
        loaded = {
            name: LoadedDraftModel(
                self.run(name), self.draft_models[name].tokenizer, self.vocab_maps[name], self.max_rows
            )
            for name in models
        }
        return DrafterParts(self.config, self.runner, self.target.tokenizer, loaded, copies, self.heads, self.corpus)

    def reload(self, drafter: str) -> DrafterParts:
        """Load the parts of one drafter again; raise `CapacityError` if there is no memory for it now."""
        need, free = self._needed_bytes(drafter), device_memory(self.target.device)
        if need > free:
            raise CapacityError(f"it needs {need / GIB:.2f} GiB and {free / GIB:.2f} GiB is free")
        name = draft_model_of(drafter)
        return self.parts([], self._quantized_copy(copy_format(drafter))) if name is None else self.parts([name], {})

    def _needed_bytes(self, drafter: str) -> int:
        name = draft_model_of(drafter)
        if name is not None:
            model = self.draft_models[name]
            return max(model.weight_bytes, model.loading_bytes) + self.tokens * model.token_bytes
        floats = self.target.loading_bytes or self.target.weight_bytes  # a copy is quantized from the float weights
        return floats + self.target.copy_bytes(copy_format(drafter))

    def _quantized_copy(self, format: QuantFormat) -> dict[QuantFormat, Decoder]:
        """Return a copy of the target with quantized weights that shares its embedding and RoPE tables."""
        copy = quantized_copy(self.target.load(), format)
        model = self.runner.model
        copy.embed, copy.rope_tables, copy.query_scales = model.embed, model.rope_tables, model.query_scales
        return {format: copy}


def draft_model_of(drafter: str) -> str | None:
    """Return the name of the draft model that a drafter needs, or None."""
    kind, _, name = drafter.partition(":")
    if kind == "model":
        return name
    return drafter if kind == "distilled" and not is_head(drafter) else None


def copy_format(drafter: str) -> QuantFormat:
    """Return the format of `self:int8` or `self:int4`."""
    return "int8" if drafter.endswith("int8") else "int4"


def drop_unaffordable(
    config: SpeculationConfig, names: tuple[str, ...], heavy: tuple[str, ...], plan: Planner
) -> SpeculationConfig:
    """Return the config without those of the `heavy` drafters that would leave too little memory for the KV cache.

    The last named is dropped first. `plan` raises `CapacityError` if not even the target fits.
    """
    left = list(names)
    plan(_with_drafters(config, [name for name in left if name not in heavy]))
    for name in reversed(heavy):
        try:
            plan(config if len(left) == len(names) else _with_drafters(config, left))
            break
        except CapacityError as error:
            left.remove(name)
            rest = f"drafting continues with {', '.join(left)}" if left else "speculative decoding is off"
            LOG.warning("%s is not loaded, it leaves too little memory: %s; %s", name, error, rest)
    return config if len(left) == len(names) else _with_drafters(config, left)


def _with_drafters(config: SpeculationConfig, names: list[str]) -> SpeculationConfig:
    return replace(config, drafter=",".join(names) or "none")
