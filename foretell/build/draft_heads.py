"""The draft heads of an engine: opened before memory is planned, loaded with the target, placed in its KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from foretell.config import SpeculationConfig
from foretell.draft import PlacedHead
from foretell.draft.heads.wiring_check import CHECK_PROMPTS, check_wiring
from foretell.errors import ModelError, UnknownModelError
from foretell.hub import Checkpoint, open_checkpoint, resolve
from foretell.kv.cache import LayerShape
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead, HeadConfig
from foretell.models.draft_heads.io import check_head_split
from foretell.models.draft_heads.loading import (
    CONVERT,
    SHIPPED,
    HeadSource,
    check_weights,
    open_head,
    open_mtp,
    pack_head,
    shipped_head,
)
from foretell.models.hf_config import read_config
from foretell.models.sharding import Shard
from foretell.models.tied_weights import read_target_weights, share_target_weights, target_weights_bytes
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.memory_plan import HeadLimits, HeadMemoryNeeds, head_workspace
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer


class Target(Protocol):
    """The model that heads draft for."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def shard(self) -> Shard | None: ...


@dataclass
class DraftHeadSet:
    """The draft heads of an engine, by the name of their drafter."""

    target: Target
    found: dict[str, HeadSource]
    loaded: dict[str, DraftHead[Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, names: Iterable[str], target: Target, model: str) -> DraftHeadSet:
        """Open the heads of these drafters without loading weights; `model` is the name of the target."""
        found = {name: _open(name, target, model) for name in names}
        for name, head in found.items():
            if target.shard is not None:
                check_head_split(head.config, target.shard.size, name)
        return cls(target, found)

    def only(self, names: Iterable[str]) -> DraftHeadSet:
        """Return the heads of these drafters."""
        return DraftHeadSet(self.target, {name: self.found[name] for name in names})

    @property
    def configs(self) -> tuple[HeadConfig, ...]:
        return tuple(head.config for head in self.found.values())

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of their weights, or of the first rank's shards."""
        return sum(head.bytes(self.target.shard) for head in self.found.values())

    @property
    def check_bytes(self) -> int:
        """Return the bytes needed for a while to check a sharded third-party head, which is loaded in full for this."""
        if self.target.shard is None or all(head.ours for head in self.found.values()):
            return 0
        tied = target_weights_bytes(self.target.config, self.target.dtype)
        return tied + max(head.bytes() for head in self.found.values() if not head.ours)

    @property
    def folders(self) -> tuple[Path | None, ...]:
        """Return their folders, from which other ranks load them."""
        return tuple(head.folder for head in self.found.values())

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        """Return the layers they need in the target's KV cache."""
        return tuple(
            shape for head in self.found.values() for shape in head_layer_shapes(head.config, self.target.shard)
        )

    @property
    def token_bytes(self) -> int:
        """Return the bytes of KV cache they need per token."""
        return sum(shape.bytes_per_token(self.target.dtype, self.target.kv_dtype) for shape in self.kv_layers)

    def needs(self, asked: HeadLimits) -> HeadMemoryNeeds:
        """Return their memory needs; workspace counts on a GPU only."""
        shard, dtype = self.target.shard, self.target.dtype
        each = [head_workspace(config, head_layer_shapes(config, shard), asked, dtype) for config in self.configs]
        return HeadMemoryNeeds(self.weight_bytes, self.token_bytes, sum(each), self.check_bytes)

    def load(self, model: Decoder, context: int) -> None:
        """Load the weights and tie shared ones to the target's, before a runner packs those."""
        if self.found:
            target_weights = share_target_weights(self.target.checkpoint, model)
            settings = (target_weights, model.dtype, context, model.shard)
            self.loaded = {name: head.load(*settings) for name, head in self.found.items()}

    def place(self, runner: ModelRunner, progress: Callable[[str], None]) -> dict[str, PlacedHead]:
        """Check and pack the heads, give them KV layers, and let the runner keep the hidden layers they read."""
        placed, first = {}, len(runner.model.layer_shapes)
        for name, head in self.loaded.items():
            if not self.found[name].ours and (message := self._check_wiring(name, runner, first)):
                progress(message)
            pack_head(head, runner.model)
            if runner.model.ranks is not None:
                head.join_ranks(runner.model.ranks)
            placed[name] = PlacedHead(head, first)
            first += len(head_layer_shapes(head.config, head.shard))
        runner.hidden_layers = tuple(
            sorted({layer for head in self.loaded.values() for layer in head.config.hidden_layers})
        )
        return placed

    def _check_wiring(self, name: str, runner: ModelRunner, first: int) -> str:
        """Check that a third-party head is wired as its config says; a sharded one is loaded in full for this."""
        head, target = self.loaded[name], self.target
        prompts = [target.tokenizer.encode(text, add_special=True) for text in CHECK_PROMPTS]
        if head.shard is None:
            return check_wiring(runner, head, prompts, name)
        full = self.found[name].load(
            read_target_weights(target.checkpoint, runner.model), runner.model.dtype, runner.context
        )
        message = check_wiring(runner, full, prompts, name)
        head.config = full.config
        assert runner.workers is not None, "a sharded head has worker processes"
        runner.workers.configure_head(first, full.config)
        return message


Model = TypeVar("Model", bound=Target)


def open_distilled(name: str, target: Model, model: str) -> Model | None:
    """Return a draft model distilled from the target, with its tokenizer and quantization; None for other drafters."""
    kind, _, folder = name.partition(":")
    if kind != "distilled":
        return None
    checkpoint = open_checkpoint(_head_folder(folder) if folder else shipped_head(model, kind))
    return replace(target, checkpoint=checkpoint, config=read_config(checkpoint))  # type: ignore[type-var]


def _open(name: str, target: Target, model: str) -> HeadSource:
    kind, _, folder = name.partition(":")
    if kind == "mtp" and not folder:
        return open_mtp(target.checkpoint, target.config)
    return open_head(_head_folder(folder) if folder else shipped_head(model, kind), target.config)


def _head_folder(folder: str) -> Path:
    """Return the folder of a head, given by path or Hugging Face id."""
    try:
        return resolve(folder)
    except ModelError as error:
        if os.path.isdir(folder):
            check_weights(Path(folder))
            raise
        if "/" not in folder:
            message = f"drafter: there is no folder {folder!r}; name the folder of a head, or a Hugging Face id"
            raise UnknownModelError(message) from None
        raise ModelError(f"{error}; pickled weights are not supported; convert them with: {CONVERT}") from error


def with_shipped_heads(speculation: SpeculationConfig, model: str) -> SpeculationConfig:
    """Add to `auto` the heads shipped with the package for this model that its file `auto` lists."""
    file = SHIPPED / model / "auto"
    names = [name.strip() for name in speculation.drafter.split(",")]
    if "auto" not in names or "/" in model or not file.is_file():
        return speculation
    return replace(speculation, drafter=",".join([*names, *file.read_text().split()]))
