"""Loads what drafters are made of: at the start, and again for one that gave its memory back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from foretell.config import SpeculationConfig
from foretell.draft.cross_tokenizer.vocab_map import VocabMap
from foretell.draft.model import MAX_ROWS
from foretell.draft.registry import DrafterParts, LoadedDraftModel, PlacedHead, is_head
from foretell.errors import CapacityError
from foretell.models.decoder import Decoder
from foretell.models.quantize import QuantFormat, quantized_copy
from foretell.runner.memory_plan import GIB, MemoryPlan, device_memory
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer


class Source(Protocol):
    """A model that can be loaded."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def weights(self) -> int: ...
    @property
    def loading(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def copy_bytes(self, format: QuantFormat) -> int: ...
    def load(self) -> Decoder: ...


@dataclass(frozen=True)
class Loader:
    """`run` loads a draft model into a runner with pages for `tokens` tokens; `vocabularies` translate its tokens."""

    config: SpeculationConfig
    target: Source
    runner: ModelRunner
    helpers: Mapping[str, Source]
    vocabularies: Mapping[str, VocabMap | None]
    run: Callable[[str], ModelRunner]
    tokens: int
    heads: Mapping[str, PlacedHead] = field(default_factory=dict)
    max_rows: int = MAX_ROWS  # of one forward of a draft model

    def parts(self, models: Iterable[str], copies: Mapping[QuantFormat, Decoder]) -> DrafterParts:
        """What drafters are made of, with these draft models and copies of the target."""
        loaded = {
            name: LoadedDraftModel(self.run(name), self.helpers[name].tokenizer, self.vocabularies[name], self.max_rows)
            for name in models
        }
        return DrafterParts(self.config, self.runner, self.target.tokenizer, loaded, copies, self.heads)

    def again(self, drafter: str) -> DrafterParts:
        """What one drafter is made of; refused where there is no room for it now."""
        need, free = self._bytes(drafter), device_memory(self.target.device)
        if need > free:
            raise CapacityError(f"it needs {need / GIB:.2f} GiB and {free / GIB:.2f} GiB is free")
        helper = helper_of(drafter)
        return self.parts([], self._copy(copy_format(drafter))) if helper is None else self.parts([helper], {})

    def _bytes(self, drafter: str) -> int:
        name = helper_of(drafter)
        if name is not None:
            helper = self.helpers[name]
            return max(helper.weights, helper.loading) + self.tokens * helper.token_bytes
        floats = self.target.loading or self.target.weights  # it is made of floats, read anew
        return floats + self.target.copy_bytes(copy_format(drafter))

    def _copy(self, format: QuantFormat) -> dict[QuantFormat, Decoder]:
        """Load the target again and return a quantized copy that shares everything else with the running target."""
        twin = quantized_copy(self.target.load(), format)
        twin.embed, twin.rope_tables = self.runner.model.embed, self.runner.model.rope_tables
        return {format: twin}


def helper_of(drafter: str) -> str | None:
    """The draft model a drafter needs, by the name it is loaded under; None where it needs none."""
    kind, _, name = drafter.partition(":")
    if kind == "model":
        return name
    return drafter if kind == "distilled" and not is_head(drafter) else None


def copy_format(drafter: str) -> QuantFormat:
    """Return the format of the drafter self:int8 or self:int4."""
    return "int8" if drafter.endswith("int8") else "int4"


LOG = logging.getLogger("foretell")

Planner = Callable[[SpeculationConfig], MemoryPlan]


def fit(config: SpeculationConfig, names: tuple[str, ...], heavy: tuple[str, ...], plan: Planner) -> SpeculationConfig:
    """The config without those of the `heavy` drafters that would leave too little room for the texts themselves.

    Of several the last named goes first. Where not even the target fits alone, that is refused.
    """
    left = list(names)
    plan(_only(config, [name for name in left if name not in heavy]))
    for name in reversed(heavy):
        try:
            plan(config if len(left) == len(names) else _only(config, left))
            break
        except CapacityError as error:
            left.remove(name)
            rest = f"{', '.join(left)} can do without it" if left else "texts are written without guesses"
            LOG.warning("%s is not loaded, for too little memory would be left: %s; %s", name, error, rest)
    return config if len(left) == len(names) else _only(config, left)


def _only(config: SpeculationConfig, names: list[str]) -> SpeculationConfig:
    return replace(config, drafter=",".join(names) or "none")
