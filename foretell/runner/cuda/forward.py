"""A decoder's layers on a CUDA device: its own products, with Triton kernels between them."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.triton.attention import attend
from foretell.kernels.triton.norm import ResidualDelta, add_norm
from foretell.kernels.triton.rotary import QKNorms, rotate_and_store
from foretell.kernels.triton.row_tables import RowTables
from foretell.kv.cache import KVCache
from foretell.models.decoder import Attention, Block, Decoder
from foretell.models.layers import Linear, Norm
from foretell.runner.cuda.linear_dispatch import LinearDispatch, Rows, format_of


class CudaForward:
    """What `Decoder.forward` and `Decoder.logits` define, from a step's tables to logits in the model's own type."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.eps = model.config.norm_eps
        self.embed_scale = float(torch.tensor(model.config.embed_scale, dtype=model.dtype))
        self.products = LinearDispatch(model.dtype)
        self.layers: list[Block] = list(model.blocks)  # type: ignore[arg-type]

    def __call__(self, rows: RowTables, wanted: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Logits of the wanted rows, [wanted, vocab], and the states after each layer in `taps`, [n, taps * width]."""
        x, change, post, tapped = self._layers(rows, taps)
        if len(self.layers) in taps:
            tapped[len(self.layers)], _ = add_norm(x, change, self.model.norm.weight, self.eps, post)
        head = format_of(self.model.head)
        _, normed = add_norm(x, change, self.model.norm.weight, self.eps, post, wanted, head)
        features = torch.cat([tapped[tap] for tap in taps], -1) if taps else None
        return self.model.gather_logits(self.products(self.model.head, normed, False)), features

    def _layers(
        self, rows: RowTables, taps: tuple[int, ...]
    ) -> tuple[Tensor, ResidualDelta, Tensor | None, dict[int, Tensor]]:
        """States before the last layer's change, that change, the norm it goes through, and what was tapped."""
        x = self.model.embed_tokens(rows.tokens)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        tapped: dict[int, Tensor] = {}
        change: ResidualDelta | None = None
        post: Tensor | None = None
        for layer, block in enumerate(self.layers):
            qkv = format_of(block.attention.qkv)
            x, normed = add_norm(x, change, block.attention_norm.weight, self.eps, post, format=qkv)
            if layer in taps:
                tapped[layer] = x
            seen = self._attend(block.attention, normed, rows)
            after, ffn = _weight(block.attention_post_norm), format_of(block.ffn.gate_up)
            x, normed = add_norm(x, seen, block.ffn_norm.weight, self.eps, after, format=ffn)
            down = format_of(block.ffn.down)
            mixed = self.products.gated(block.ffn.gate_up, normed, rows.is_prefill, block.ffn.gelu, down)
            change = self._change(block.ffn.down, mixed, rows.is_prefill)
            post = _weight(block.ffn_post_norm)
        assert change is not None, "a decoder has layers"
        return x, change, post, tapped

    def _attend(self, attention: Attention, x: Rows, rows: RowTables) -> ResidualDelta:
        keys, values = self.cache.keys[attention.layer], self.cache.values[attention.layer]
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = QKNorms(attention.q_norm.weight, attention.k_norm.weight, self.eps)
        turns = self.model.rope_tables[attention.rope]
        q = rotate_and_store(self.products(attention.qkv, x, rows.is_prefill), turns, rows, keys, values, norms)
        seen = attend(q, keys, values, rows, attention.config.scale, attention.window)
        return self._change(attention.out, seen, rows.is_prefill)

    def _change(self, layer: Linear, x: Rows, reads: bool) -> ResidualDelta:
        """In parts, for a reader that adds them up; with other ranks their parts are added here, in the same order."""
        if self.model.ranks is None:
            return self.products.in_parts(layer, x, reads)
        return ResidualDelta(self.model.ranks.all_reduce(self.products(layer, x, reads))[None])


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
