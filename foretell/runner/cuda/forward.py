"""A decoder's forward pass on a CUDA device: matrix products, with Triton kernels in between."""

from __future__ import annotations

from dataclasses import replace

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
    """Computes what `Decoder.forward` and `Decoder.logits` define from a step's tables; logits in the model's dtype."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.eps = model.config.norm_eps
        self.embed_scale = float(torch.tensor(model.config.embed_scale, dtype=model.dtype))
        self.linear = LinearDispatch(model.dtype)
        self.layers: list[Block] = list(model.blocks)  # type: ignore[arg-type]

    def __call__(
        self, rows: RowTables, logits_indices: Tensor, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [indices, vocab] and the hidden states after `hidden_layers` [rows, layers * width]."""
        x, change, post, hidden = self._layers(rows, hidden_layers)
        if len(self.layers) in hidden_layers:
            hidden[len(self.layers)], _ = add_norm(x, change, self.model.norm.weight, self.eps, post)
        head = format_of(self.model.head)
        _, normed = add_norm(x, change, self.model.norm.weight, self.eps, post, logits_indices, head)
        states = torch.cat([hidden[layer] for layer in hidden_layers], -1) if hidden_layers else None
        return self.model.finish_logits(self.linear(self.model.head, normed, False)), states

    def _layers(
        self, rows: RowTables, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, ResidualDelta, Tensor | None, dict[int, Tensor]]:
        """Run all layers but for the last residual addition, which is fused into the norm that follows.

        Returns the states before it, the change to add, the weight of the post-norm that the change goes through, and
        the hidden states by layer.
        """
        x = self.model.embed_tokens(rows.tokens)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        hidden: dict[int, Tensor] = {}
        change: ResidualDelta | None = None
        post: Tensor | None = None
        for layer, block in enumerate(self.layers):
            qkv = format_of(block.attention.qkv)
            assert block.attention_norm is not None and block.ffn_norm is not None, "`missing_fast_path` has checked"
            x, normed = add_norm(x, change, block.attention_norm.weight, self.eps, post, format=qkv)
            if layer in hidden_layers:
                hidden[layer] = x
            attended = self._attend(block.attention, normed, rows)
            after, ffn = _weight(block.attention_post_norm), format_of(block.ffn.gate_up)
            x, normed = add_norm(x, attended, block.ffn_norm.weight, self.eps, after, format=ffn)
            down = format_of(block.ffn.down)
            gated = self.linear.gated(block.ffn.gate_up, normed, rows.is_prefill, block.ffn.gelu, down)
            change = self._row_parallel(block.ffn.down, gated, rows.is_prefill)
            post = _weight(block.ffn_post_norm)
        assert change is not None, "a decoder has layers"
        return x, change, post, hidden

    def _attend(self, attention: Attention, x: Rows, rows: RowTables) -> ResidualDelta:
        keys, values = self.cache.keys[attention.layer], self.cache.values[attention.layer]
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = QKNorms(attention.q_norm.weight, attention.k_norm.weight, self.eps)
        turns = self.model.rope_tables[attention.rope]
        q = rotate_and_store(self.linear(attention.qkv, x, rows.is_prefill), turns, rows, keys, values, norms)
        attended = attend(q, keys, values, rows, attention.config.scale, attention.window)
        return self._row_parallel(attention.out, attended, rows.is_prefill)

    def _row_parallel(self, layer: Linear, x: Rows, reads: bool) -> ResidualDelta:
        """Return partial sums that the next norm adds up. With tensor parallelism the ranks' sums are added here."""
        if self.model.ranks is None:
            return _scaled(self.linear.in_parts(layer, x, reads), self.model.config.residual_scale)
        joined = self.model.ranks.all_reduce(self.linear(layer, x, reads))
        return _scaled(ResidualDelta(joined[None]), self.model.config.residual_scale)


def _scaled(delta: ResidualDelta, scale: float) -> ResidualDelta:
    if scale == 1:
        return delta
    if delta.row_scales is not None:
        return replace(delta, row_scales=delta.row_scales * scale)
    return replace(delta, splits=delta.splits * scale)


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
