"""Shards of draft heads on a worker: loaded with the target's shard, fed with its hidden states, run by messages."""

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


def open_heads(spec: ModelShardSpec, target: ModelConfig, checkpoint: Checkpoint) -> list[HeadSource]:
    """Open the heads of a target, in the order of their layers in its KV cache."""
    return [open_mtp(checkpoint, target) if folder is None else open_head(folder, target) for folder in spec.heads]


def load_shard(spec: ModelShardSpec, model: Decoder, ranks: Ranks) -> tuple[ModelRunner, RankHeads]:
    """Return a runner of this rank's shard of a model, and the shards of its heads."""
    checkpoint = open_checkpoint(spec.checkpoint)
    opened = open_heads(spec, model.config, checkpoint)
    lender = share_target_weights(checkpoint, model)  # before the target's weights are packed
    loaded = [each.load(lender, model.dtype, spec.context, model.shard) for each in opened]
    shapes = [head_layer_shapes(head.config, model.shard) for head in loaded]
    ready = spec.quantize(model)
    runner = ModelRunner(
        ready,
        spec.pages,
        spec.page_size,
        spec.context,
        extra_layers=tuple(shape for few in shapes for shape in few),
        kv_dtype=spec.kv_dtype,
    )
    ops, first = dict[int, TorchHeadOps](), len(ready.layer_shapes)
    for head, own in zip(loaded, shapes, strict=True):
        pack_head(head, runner.model)
        head.join_ranks(ranks)
        ops[first] = make_head_ops(head, HeadPages.of(head, runner.cache, first))
        first += len(own)
    return runner, RankHeads(runner.model, ops)


@dataclass
class RankHeads:
    """Shards of the heads of a target, by the index of their first KV cache layer."""

    target: Decoder
    ops: dict[int, TorchHeadOps]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return the target layers whose hidden states the heads need."""
        return tuple(sorted({layer for ops in self.ops.values() for layer in _config(ops).hidden_layers}))

    @property
    def bytes(self) -> int:
        return sum(head_bytes(ops.head, self.target) for ops in self.ops.values())

    def store_hidden_states(self, packed: BatchLayout, states: Tensor | None) -> None:
        """Store the hidden states of every row. Rejected rows are overwritten later; moves follow the target's KV."""
        if states is None:
            return
        slots = torch.tensor(packed.slots, device=states.device)
        for ops in self.ops.values():
            ops.store_hidden_states(slots, self._select_layers(_config(ops), states))

    def _select_layers(self, config: HeadConfig, states: Tensor) -> Tensor:
        by_layer = dict(
            zip(self.hidden_layers, states.view(len(states), len(self.hidden_layers), -1).unbind(1), strict=True)
        )
        return torch.cat([by_layer[layer] for layer in config.hidden_layers], 1)

    def apply(self, head: int, message: HeadOp | HeadConfig) -> None:
        """Run an operation of the leader, or set the config of a head."""
        if isinstance(message, HeadOp):
            self.ops[head].run(message)
        else:
            self.ops[head].head.config = message


def _config(ops: TorchHeadOps) -> HeadConfig:
    config: HeadConfig = ops.head.config
    return config
