"""A rank's parts of the heads that guess for a target: loaded with it, told what to keep after its steps, and to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.hub import Checkpoint, open_checkpoint
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import HeadConfig
from foretell.models.draft_heads.loading import HeadSource, open_head, open_mtp, pack_head
from foretell.models.sharding import Ranks
from foretell.models.tied_weights import share_target_weights
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.heads.kv import HeadPages, head_layer_shapes
from foretell.runner.heads.ops import HeadOp, TorchHeadOps, make_head_ops
from foretell.runner.model_runner import ModelRunner

from .messages import ModelShardSpec, head_bytes


def open_heads(part: ModelShardSpec, target: ModelConfig, checkpoint: Checkpoint) -> list[HeadSource]:
    """Those of a target's part, in the order of their layers in its cache."""
    return [open_mtp(checkpoint, target) if folder is None else open_head(folder, target) for folder in part.heads]


def load_shard(part: ModelShardSpec, model: Decoder, ranks: Ranks) -> tuple[ModelRunner, RankHeads]:
    """What runs a rank's part of a model, and of the heads that lie with it."""
    checkpoint = open_checkpoint(part.checkpoint)
    opened = open_heads(part, model.config, checkpoint)
    lender = share_target_weights(checkpoint, model)  # before the runner packs the target's weights away
    loaded = [each.load(lender, model.dtype, part.context, model.shard) for each in opened]
    shapes = [head_layer_shapes(head.config, model.shard) for head in loaded]
    ready = part.quantize(model)
    runner = ModelRunner(
        ready, part.pages, part.page_size, part.context, extra_layers=tuple(shape for few in shapes for shape in few)
    )
    works, first = dict[int, TorchHeadOps](), len(ready.layer_shapes)
    for head, own in zip(loaded, shapes, strict=True):
        pack_head(head, runner.model)
        head.join_ranks(ranks)
        works[first] = make_head_ops(head, HeadPages.of(head, runner.cache, first))
        first += len(own)
    return runner, RankHeads(runner.model, works)


@dataclass
class RankHeads:
    """By where the layers of each begin in the cache."""

    target: Decoder
    ops: dict[int, TorchHeadOps]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose states they want."""
        return tuple(sorted({tap for work in self.ops.values() for tap in _config(work).hidden_layers}))

    @property
    def bytes(self) -> int:
        return sum(head_bytes(work.head, self.target) for work in self.ops.values())

    def store_hidden_states(self, packed: BatchLayout, features: Tensor | None) -> None:
        """Of every row of a step: which of them stay is told later, and their slots move with the target's."""
        if features is None:
            return
        slots = torch.tensor(packed.slots, device=features.device)
        for work in self.ops.values():
            work.store_hidden_states(slots, self._select_layers(_config(work), features))

    def _select_layers(self, config: HeadConfig, features: Tensor) -> Tensor:
        by_tap = dict(
            zip(self.hidden_layers, features.view(len(features), len(self.hidden_layers), -1).unbind(1), strict=True)
        )
        return torch.cat([by_tap[tap] for tap in config.hidden_layers], 1)

    def apply(self, head: int, told: HeadOp | HeadConfig) -> None:
        """What the first rank does now, or how a head is connected."""
        if isinstance(told, HeadOp):
            self.ops[head].run(told)
        else:
            self.ops[head].head.config = told


def _config(work: TorchHeadOps) -> HeadConfig:
    config: HeadConfig = work.head.config
    return config
