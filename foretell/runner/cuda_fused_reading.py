"""What a head keeps of places, by fused kernels: between two products stands one launch. `WholeReader` defines it."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.kernels.triton.norm import norm_parts
from foretell.kernels.triton.pairs import KeptFeatures, Side, keep_pairs
from foretell.kernels.triton.rotary import turn_and_store
from foretell.models.heads import EagleHead
from foretell.models.heads.layer import HeadLayer
from foretell.models.layers import Norm

from .cuda_fused import Level, head_norms, product
from .cuda_products import Products
from .cuda_reading import BEFORE, PLACE, SLOT, TOKEN, ReadTable, WholeReader


@dataclass(frozen=True)
class PartNorm:
    """A norm of each of some parts of a row."""

    weights: Tensor  # [parts, width]
    eps: float


class FusedReader(WholeReader):
    """Of a head that `is_fused` and has one layer, of which keys and values are all there is to keep."""

    leaves_out = True
    head: EagleHead

    def __init__(
        self, head: EagleHead, keys: Several[Tensor], values: Several[Tensor], features: Tensor, page_size: int
    ) -> None:
        super().__init__(head, keys, values, features, page_size)
        self.kept = features.view(-1, features.shape[-1])
        self.products, self.norms = Products(head.like.dtype), _norms_before(head)

    def run(self, table: ReadTable) -> None:
        head, layer = self.head, self.head.layers[0]
        assert isinstance(layer, HeadLayer) and layer.attention_norm is None, "the first layer reads pairs"
        assert head.embed_norm is not None and head.feature_norm is not None, "asked before"
        states = table.inputs
        for norm in self.norms:
            states = norm_parts(states, norm.weights, norm.eps)
        fresh = product(self.products, head.fc, states)
        embedded = Side(head.embedding, table.field(TOKEN), head.embed_norm.weight)
        places = KeptFeatures(fresh, self.kept, table.field(SLOT), table.field(BEFORE))
        scale, eps = head.config.embed_scale, head.config.layer.norm_eps
        pairs = keep_pairs(embedded, places, head.feature_norm.weight, scale, eps)
        kv = product(self.products, layer.attention.kv, pairs)  # without queries, which nobody asks
        rows = Level(table.field(PLACE), table.field(SLOT))
        turn_and_store(kv, head.table, rows, self.keys[0], self.values[0], head_norms(layer.attention))


def _norms_before(head: EagleHead) -> list[PartNorm]:
    """Those that stand between the target's states and their projection, in their order."""
    found, eps = [], head.config.layer.norm_eps
    if head.config.target_norm:
        assert head.tap_norm is not None, "borrow first"
        found.append(PartNorm(head.tap_norm[None], head.tap_eps))
    if head.config.fc_norm:
        weights = [norm.weight.data for norm in head.tap_norms if isinstance(norm, Norm)]
        found.append(PartNorm(torch.stack(weights), eps))
    if head.fc_norm is not None:
        found.append(PartNorm(head.fc_norm.weight[None], eps))
    return found
