"""The heads an engine is built with: opened before memory is planned, loaded with the target, placed in its cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from foretell.config import SpeculationConfig
from foretell.draft import PlacedHead
from foretell.draft.heads.wiring_check import OPENINGS, examine
from foretell.errors import ModelError
from foretell.hub import Checkpoint, open_checkpoint, resolve
from foretell.kv.cache import LayerShape
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead, HeadConfig
from foretell.models.draft_heads.loading import (
    CONVERT,
    SHIPPED,
    OpenedHead,
    check_weights,
    open_head,
    open_own,
    pack_head,
    shipped,
)
from foretell.models.draft_heads.sharding import check_split_head
from foretell.models.hf_config import read_config
from foretell.models.sharding import Shard
from foretell.models.tied_weights import lend, read_whole, whole_bytes
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.memory_plan import HeadLimits, HeadMemoryNeeds, head_workspace
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer


class Target(Protocol):
    """The model that heads guess for."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shard(self) -> Shard | None: ...


@dataclass
class DraftHeadSet:
    """By the name of the drafter each is for."""

    target: Target
    found: dict[str, OpenedHead]
    loaded: dict[str, DraftHead[Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, names: Iterable[str], target: Target, model: str) -> DraftHeadSet:
        """Look at the heads of these drafters; `model` is what the target was asked for by."""
        found = {name: _open(name, target, model) for name in names}
        for name, head in found.items():
            if target.shard is not None:
                check_split_head(head.config, target.shard.size, name)
        return cls(target, found)

    def only(self, names: Iterable[str]) -> DraftHeadSet:
        """Some of them."""
        return DraftHeadSet(self.target, {name: self.found[name] for name in names})

    @property
    def configs(self) -> tuple[HeadConfig, ...]:
        """What each is made of."""
        return tuple(head.config for head in self.found.values())

    @property
    def weights(self) -> int:
        """Bytes of all their weights, or of the first rank's part of them."""
        return sum(head.bytes(self.target.shard) for head in self.found.values())

    @property
    def examining(self) -> int:
        """Bytes that are held for a while where a head of others has to be examined and is split: all of it."""
        if self.target.shard is None or all(head.ours for head in self.found.values()):
            return 0
        lent = whole_bytes(self.target.config, self.target.dtype)
        return lent + max(head.bytes() for head in self.found.values() if not head.ours)

    @property
    def folders(self) -> tuple[Path | None, ...]:
        """Where other ranks find them."""
        return tuple(head.folder for head in self.found.values())

    @property
    def beside(self) -> tuple[LayerShape, ...]:
        """The layers they need in the target's cache."""
        return tuple(
            shape for head in self.found.values() for shape in head_layer_shapes(head.config, self.target.shard)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of cache they take for a token."""
        return sum(shape.bytes_per_token(self.target.dtype) for shape in self.beside)

    def needs(self, asked: HeadLimits) -> HeadMemoryNeeds:
        """What they ask of memory on a GPU; elsewhere what they work with is not counted."""
        shard, dtype = self.target.shard, self.target.dtype
        each = [head_workspace(config, head_layer_shapes(config, shard), asked, dtype) for config in self.configs]
        return HeadMemoryNeeds(self.weights, self.token_bytes, sum(each), self.examining)

    def load(self, model: Decoder, context: int) -> None:
        """Read the weights and borrow the target's, before a runner packs those away."""
        if self.found:
            lender = lend(self.target.checkpoint, model)
            settings = (lender, model.dtype, context, model.shard)
            self.loaded = {name: head.load(*settings) for name, head in self.found.items()}

    def place(self, runner: ModelRunner, say: Callable[[str], None]) -> dict[str, PlacedHead]:
        """Examine them, ready them, and let the target's runner tap what they want."""
        placed, first = {}, len(runner.model.layer_shapes)
        for name, head in self.loaded.items():
            if not self.found[name].ours and (words := self._examine(name, runner, first)):
                say(words)
            pack_head(head, runner.model)
            if runner.model.ranks is not None:
                head.meet(runner.model.ranks)
            placed[name] = PlacedHead(head, first)
            first += len(head_layer_shapes(head.config, head.shard))
        runner.hidden_layers = tuple(sorted({tap for head in self.loaded.values() for tap in head.config.taps}))
        return placed

    def _examine(self, name: str, runner: ModelRunner, first: int) -> str:
        """Whether a head of others is wired as its file says; of one that is split, by the whole of it for once."""
        head, target = self.loaded[name], self.target
        starts = [target.tokenizer.encode(text, add_special=True) for text in OPENINGS]
        if head.shard is None:
            return examine(runner, head, starts, name)
        whole = self.found[name].load(read_whole(target.checkpoint, runner.model), runner.model.dtype, runner.context)
        words = examine(runner, whole, starts, name)
        head.config = whole.config
        assert runner.workers is not None, "the other parts are there"
        runner.workers.configure_head(first, whole.config)
        return words


Model = TypeVar("Model", bound=Target)


def distilled(name: str, target: Model, model: str) -> Model | None:
    """A draft model made from the target: it speaks the target's tokens, and is rounded as that is. None: another."""
    kind, _, folder = name.partition(":")
    if kind != "distilled":
        return None
    checkpoint = open_checkpoint(resolve(folder) if folder else shipped(model, kind))
    return replace(target, checkpoint=checkpoint, config=read_config(checkpoint))  # type: ignore[type-var]


def _open(name: str, target: Target, model: str) -> OpenedHead:
    kind, _, folder = name.partition(":")
    if kind == "mtp" and not folder:
        return open_own(target.checkpoint, target.config)
    return open_head(_found(folder) if folder else shipped(model, kind), target.config)


def _found(folder: str) -> Path:
    """A head's folder, or that of a Hugging Face id, whose heads often come pickled."""
    try:
        return resolve(folder)
    except ModelError as error:
        if os.path.isdir(folder):
            check_weights(Path(folder))
        raise ModelError(f"{error}; pickled weights are not read, and this converts them: {CONVERT}") from error


def settled(speculation: SpeculationConfig, model: str) -> SpeculationConfig:
    """With `auto`, also those of the heads that come with the package for a model that its file `auto` names."""
    file = SHIPPED / model / "auto"
    names = [name.strip() for name in speculation.drafter.split(",")]
    if "auto" not in names or "/" in model or not file.is_file():
        return speculation
    return replace(speculation, drafter=",".join([*names, *file.read_text().split()]))
