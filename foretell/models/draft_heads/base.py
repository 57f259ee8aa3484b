"""The base class of draft heads: weights shared with the target, draft vocabulary, RoPE, sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.decoder import Decoder
from foretell.models.layers import Linear, Norm
from foretell.models.quantize import CudaQuantizedLinear
from foretell.models.rope import rope_table
from foretell.models.sharding import Ranks, Shard

from .config import HeadConfig, LayerConfig
from .layer import HeadLayer, RopeRows, init_weights

Settings = TypeVar("Settings", bound=HeadConfig)


@dataclass(frozen=True)
class TargetWeights:
    """Weights of the target that a draft head may share: embedding, LM head and final norm.

    On a tensor-parallel rank they are the rows of that rank.
    """

    embed: Tensor  # [vocab, target width]
    output: Tensor  # [vocab, target width]
    norm: Tensor  # [target width]
    norm_eps: float
    find_output_rows: Callable[[Tensor], Tensor] | None = None  # LM head rows of tokens that may be on other ranks

    @classmethod
    def of(cls, target: Decoder) -> TargetWeights:
        """Return the weights of a target that is not packed yet."""
        output = target.embed if target.config.tied else target.head.weight
        assert output is not None, "share weights before the target is prepared"
        return cls(target.embed.data, output.data, target.norm.weight.data, target.config.norm_eps)

    def output_rows(self, tokens: Tensor) -> Tensor:
        """Return the LM head rows of some tokens."""
        return self.output[tokens] if self.find_output_rows is None else self.find_output_rows(tokens)


class DraftHead(nn.Module, Generic[Settings]):
    """A draft head. Shared tensors are outside of its state dict: they are neither trained nor written.

    A tensor-parallel rank has a shard of every layer, of the vocabulary and of the projected hidden states; states
    between layers are replicated.
    """

    draft_ids: Tensor  # [outputs], ascending: the target's token id of each output
    like: Tensor

    def __init__(self, config: Settings, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.local = local_layer_config(config.layer, shard)  # config of this rank's shard
        self.ranks: Ranks | None = None
        width = config.layer.width
        ids = torch.arange(config.outputs, device="cpu")  # on the meta device it would import sympy: half a second
        self.register_buffer("draft_ids", ids, persistent=config.draft_vocab is not None)
        self.register_buffer("like", torch.zeros(0), persistent=False)  # has the dtype and device of the head
        self.embed = _table(len(self.local_tokens), width) if config.own_embed else None
        self.output = Linear(width, len(self.local_outputs))
        self.target_norm: Tensor | None = None
        self.target_norm_eps = config.layer.norm_eps
        self._table: Tensor | None = None
        self._shared_embed: Tensor | None = None

    def join_ranks(self, ranks: Ranks) -> None:
        """Connect the other tensor-parallel ranks."""
        self.ranks = ranks
        for layer in self.modules():
            if isinstance(layer, HeadLayer):
                layer.ranks = ranks

    def local_range(self, numbers: int) -> range:
        """Return the range of this rank out of `numbers` columns."""
        return range(numbers) if self.shard is None else self.shard.split(numbers)

    @property
    def local_tokens(self) -> range:
        """Return the target tokens whose embedding is on this rank."""
        return self.local_range(self.config.vocab)

    @property
    def local_outputs(self) -> range:
        """Return the draft vocabulary whose output rows are on this rank."""
        return self.local_range(self.config.outputs)

    @property
    def local_columns(self) -> range:
        """Return the columns of projected hidden states that are on this rank."""
        return self.local_range(self.config.layer.width)

    def gather_columns(self, part: Tensor) -> Tensor:
        """Gather hidden states [..., width] of which each rank has its columns."""
        if self.ranks is None:
            return part
        local, rows = self.local_columns, part.new_zeros(*part.shape[:-1], self.config.layer.width)
        rows[..., local.start : local.stop] = part
        return self.ranks.all_reduce(rows)

    def local_hidden(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's part of the target's hidden states, [..., local columns]."""
        local = self.local_columns
        return hidden_states[..., local.start : local.stop]

    @property
    def is_fusible(self) -> bool:
        """Return whether the fused CUDA kernels support this head."""
        return False

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Return the names of shared parameters, which the head's file does not have."""
        return () if self.config.own_output else ("output.weight",)

    def share_weights(self, target: TargetWeights) -> None:
        """Take from the target the weights that this head does not own; set `draft_ids` and the device before."""
        if not self.config.own_embed:
            assert target.embed.shape == (len(self.local_tokens), self.config.layer.width), (
                "the embedding has the shape of the head"
            )
            self._shared_embed = target.embed
        if not self.config.own_output:
            local = self.local_outputs
            ids = self.draft_ids[local.start : local.stop]
            rows = target.output if self.config.draft_vocab is None else target.output_rows(ids)
            self.output.weight = nn.Parameter(rows.to(self.like), requires_grad=False)
        if self.config.target_norm:
            self.target_norm, self.target_norm_eps = target.norm.to(self.like), target.norm_eps

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialize random weights for training."""
        init_weights(self, generator, self.shared_parameters)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters to train, with gradients enabled: all but the target's."""
        found = [each for name, each in self.named_parameters() if name not in (*self.shared_parameters, "embed")]
        for parameter in found:
            parameter.requires_grad_(True)
        return found

    @property
    def bytes(self) -> int:
        """Return the bytes of its own weights, without shared ones."""
        linears = [module for name, module in self.named_modules() if isinstance(module, Linear) and name != "output"]
        packed = sum(module.native.bytes for module in linears if module.native is not None)
        packed += sum(module.quantized.nbytes for module in linears if isinstance(module, CudaQuantizedLinear))
        return packed + sum(tensor.nbytes for tensor in self.own_state_dict().values())

    def own_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the head's file: all that are not shared."""
        return {name: tensor for name, tensor in self.state_dict().items() if name not in self.shared_parameters}

    def prepare(self, context: int) -> None:
        """Build the RoPE table for positions up to `context`."""
        device, layer = self.draft_ids.device, self.config.layer
        self._table = rope_table(layer.rope, layer.head_dim, context).to(device, self.like.dtype)

    @property
    def rope_table(self) -> Tensor:
        """Return cosines and sines by position, [positions, 2, head_dim]."""
        assert self._table is not None, "call prepare first"
        return self._table

    @property
    def embedding(self) -> Tensor:
        """Return the embedding [local tokens, width], its own or the target's."""
        table = self.embed if self.embed is not None else self._shared_embed
        assert table is not None, "call share_weights first"
        return table

    def rope_rows(self, positions: Tensor) -> RopeRows:
        """Return cosines and sines of rows at these positions."""
        rows = self.rope_table[positions]
        return rows[..., :1, :], rows[..., 1:, :]

    def rope_rows_clamped(self, positions: Tensor) -> RopeRows:
        """Return `rope_rows` for positions that may exceed the table.

        In a batch one sequence may end before another has all its draft tokens; those past its end are dropped.
        """
        return self.rope_rows(positions.clamp_max(len(self.rope_table) - 1))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., width] of target tokens."""
        rows = self.lookup_rows(tokens, self.embedding)
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def lookup_rows(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return rows of a table by token, summed over ranks: a rank contributes zeros for tokens of other ranks."""
        if self.ranks is None:
            return F.embedding(tokens, table).to(self.like.dtype)
        local = self.local_tokens
        is_remote = (tokens < local.start) | (tokens >= local.stop)
        rows = F.embedding((tokens - local.start).masked_fill(is_remote, 0), table).to(self.like.dtype)
        return self.ranks.all_reduce(rows.masked_fill(is_remote[..., None], 0.0))

    def normalize_hidden(self, hidden_states: Tensor) -> Tensor:
        """Apply the target's final norm to hidden states [..., hidden layers * target width] if the head needs it."""
        if not self.config.target_norm:
            return hidden_states
        assert self.target_norm is not None, "call share_weights first"
        return rms_norm(hidden_states, self.target_norm, self.target_norm_eps)

    def output_logits(self, normed: Tensor) -> Tensor:
        """Return logits [..., local outputs] over `draft_ids`, in float32, of states [..., width]."""
        rows: Tensor = self.output(normed.reshape(-1, normed.shape[-1]))
        return rows.float().view(*normed.shape[:-1], -1)


def norm_each(x: Tensor, norms: nn.ModuleList, eps: float) -> Tensor:
    """Apply a separate RMS norm to each part of rows [..., parts * width]."""
    parts = zip(x.chunk(len(norms), -1), norms, strict=True)
    return torch.cat([rms_norm(part, _weight(norm), eps) for part, norm in parts], -1)


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, Norm), "the list holds norms"
    return norm.weight


def local_layer_config(layer: LayerConfig, shard: Shard | None) -> LayerConfig:
    """Return the config of a rank's shard of a layer, split like the target's."""
    if shard is None:
        return layer
    heads, kv_heads, ffn = (len(deal(layer)) for deal in (shard.heads, shard.kv_heads, shard.ffn))
    return replace(layer, heads=heads, kv_heads=kv_heads, ffn=ffn)


def _table(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns), requires_grad=False)
