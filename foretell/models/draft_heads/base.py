"""What all heads have in common: what they borrow of the target, what they speak of, and their file."""

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
    """What a head may borrow: the target's embedding, its output rows and its last norm; of one of several ranks the
    rows that lie there."""

    embed: Tensor  # [vocab, target width]
    output: Tensor  # [vocab, target width]
    norm: Tensor  # [target width]
    norm_eps: float
    find_output_rows: Callable[[Tensor], Tensor] | None = None  # output rows of tokens that may lie on other ranks

    @classmethod
    def of(cls, target: Decoder) -> TargetWeights:
        """Of a target whose weights are not packed away yet."""
        output = target.embed if target.config.tied else target.head.weight
        assert output is not None, "borrow before the target is prepared"
        return cls(target.embed.data, output.data, target.norm.weight.data, target.config.norm_eps)

    def output_rows(self, tokens: Tensor) -> Tensor:
        """Output rows of some tokens."""
        return self.output[tokens] if self.find_output_rows is None else self.find_output_rows(tokens)


class DraftHead(nn.Module, Generic[Settings]):
    """Borrowed tensors are buffers outside the state dict: they are neither trained nor written.

    One of several ranks has a part of every layer, of the vocabulary and of what the target's features become; states
    between layers are whole everywhere.
    """

    draft_ids: Tensor  # [outputs], rising: the target's token for each of the head's own
    like: Tensor

    def __init__(self, config: Settings, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.local = local_layer_config(config.layer, shard)  # what lies here
        self.ranks: Ranks | None = None
        width = config.layer.width
        ids = torch.arange(config.outputs, device="cpu")  # of shapes alone it would be made by symbols: half a second
        self.register_buffer("draft_ids", ids, persistent=config.draft_vocab is not None)
        self.register_buffer("like", torch.zeros(0), persistent=False)  # has the type and device the head is in
        self.embed = _table(len(self.local_tokens), width) if config.own_embed else None
        self.output = Linear(width, len(self.local_outputs))
        self.target_norm: Tensor | None = None
        self.target_norm_eps = config.layer.norm_eps
        self._table: Tensor | None = None
        self._lent: Tensor | None = None

    def join_ranks(self, ranks: Ranks) -> None:
        """Run with the others that have the rest of the head."""
        self.ranks = ranks
        for layer in self.modules():
            if isinstance(layer, HeadLayer):
                layer.ranks = ranks

    def local_range(self, numbers: int) -> range:
        """Of so many numbers in a row those that lie here."""
        return range(numbers) if self.shard is None else self.shard.split(numbers)

    @property
    def local_tokens(self) -> range:
        """Those of the target's whose embedding lies here."""
        return self.local_range(self.config.vocab)

    @property
    def local_outputs(self) -> range:
        """Those of the tokens it can guess whose rows lie here."""
        return self.local_range(self.config.outputs)

    @property
    def local_columns(self) -> range:
        """Those of a feature that are made and kept here."""
        return self.local_range(self.config.layer.width)

    def gather_columns(self, part: Tensor) -> Tensor:
        """Features [..., width] of which each rank has its columns."""
        if self.ranks is None:
            return part
        here, rows = self.local_columns, part.new_zeros(*part.shape[:-1], self.config.layer.width)
        rows[..., here.start : here.stop] = part
        return self.ranks.all_reduce(rows)

    def local_hidden(self, features: Tensor) -> Tensor:
        """What is kept here of the target's features, [..., columns here]."""
        here = self.local_columns
        return features[..., here.start : here.stop]

    @property
    def is_fusible(self) -> bool:
        """Whether a GPU's fused kernels know how it guesses."""
        return False

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Parameters that are borrowed, which no file of a head's own has."""
        return () if self.config.own_output else ("output.weight",)

    def share_weights(self, lender: TargetWeights) -> None:
        """Take from the target what this head does not have itself; set `draft_ids` and the device before."""
        if not self.config.own_embed:
            assert lender.embed.shape == (len(self.local_tokens), self.config.layer.width), "an embedding that fits"
            self._lent = lender.embed
        if not self.config.own_output:
            here = self.local_outputs
            ids = self.draft_ids[here.start : here.stop]
            rows = lender.output if self.config.draft_vocab is None else lender.output_rows(ids)
            self.output.weight = nn.Parameter(rows.to(self.like), requires_grad=False)
        if self.config.target_norm:
            self.target_norm, self.target_norm_eps = lender.norm.to(self.like), lender.norm_eps

    def init_weights(self, generator: torch.Generator) -> None:
        """Weights to start training from."""
        init_weights(self, generator, self.shared_parameters)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What training may change, ready for it: all but what is the target's."""
        found = [each for name, each in self.named_parameters() if name not in (*self.shared_parameters, "embed")]
        for parameter in found:
            parameter.requires_grad_(True)
        return found

    @property
    def bytes(self) -> int:
        """What its weights take, without what is borrowed."""
        linears = [module for name, module in self.named_modules() if isinstance(module, Linear) and name != "output"]
        packed = sum(module.native.bytes for module in linears if module.native is not None)
        packed += sum(module.quantized.nbytes for module in linears if isinstance(module, CudaQuantizedLinear))
        return packed + sum(tensor.nbytes for tensor in self.own_state_dict().values())

    def own_state_dict(self) -> dict[str, Tensor]:
        """What a file of this head has: all that is not borrowed."""
        return {name: tensor for name, tensor in self.state_dict().items() if name not in self.shared_parameters}

    def prepare(self, context: int) -> None:
        """Make the table of turns for places up to `context`."""
        device, layer = self.draft_ids.device, self.config.layer
        self._table = rope_table(layer.rope, layer.head_dim, context).to(device, self.like.dtype)

    @property
    def rope_table(self) -> Tensor:
        """Cosines and sines of each place, [places, 2, head_dim]."""
        assert self._table is not None, "prepare first"
        return self._table

    @property
    def embedding(self) -> Tensor:
        """[tokens here, width], its own or the target's."""
        table = self.embed if self.embed is not None else self._lent
        assert table is not None, "borrow first"
        return table

    def rope_rows(self, positions: Tensor) -> RopeRows:
        """How rows at these positions are turned."""
        rows = self.rope_table[positions]
        return rows[..., :1, :], rows[..., 1:, :]

    def rope_rows_clamped(self, positions: Tensor) -> RopeRows:
        """The same where texts are guessed for together, and one comes to its end before another has all its guesses:
        what is guessed behind the end is dropped, and only has to be turned by something."""
        return self.rope_rows(positions.clamp_max(len(self.rope_table) - 1))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[..., width], for the target's tokens."""
        rows = self.lookup_rows(tokens, self.embedding)
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def lookup_rows(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of a table by token; of one that lies elsewhere this rank has zeros, and another the rest."""
        if self.ranks is None:
            return F.embedding(tokens, table).to(self.like.dtype)
        here = self.local_tokens
        elsewhere = (tokens < here.start) | (tokens >= here.stop)
        rows = F.embedding((tokens - here.start).masked_fill(elsewhere, 0), table).to(self.like.dtype)
        return self.ranks.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))

    def normalize_hidden(self, features: Tensor) -> Tensor:
        """Features [..., taps * target width] behind the target's last norm, where this head wants them so."""
        if not self.config.target_norm:
            return features
        assert self.target_norm is not None, "borrow first"
        return rms_norm(features, self.target_norm, self.target_norm_eps)

    def output_logits(self, normed: Tensor) -> Tensor:
        """[..., width] -> [..., outputs here] in float32, over `draft_ids`."""
        rows: Tensor = self.output(normed.reshape(-1, normed.shape[-1]))
        return rows.float().view(*normed.shape[:-1], -1)

    def expand_to_vocab(self, logits: Tensor) -> Tensor:
        """Scores over all of the target's tokens: those the head cannot guess have none."""
        if self.config.draft_vocab is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab), float("-inf"))
        return whole.index_copy_(-1, self.draft_ids, logits)


def norm_each(x: Tensor, norms: nn.ModuleList, eps: float) -> Tensor:
    """Rows [..., parts * width], of which each part has a norm of its own."""
    parts = zip(x.chunk(len(norms), -1), norms, strict=True)
    return torch.cat([rms_norm(part, _weight(norm), eps) for part, norm in parts], -1)


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, Norm), "norms are kept"
    return norm.weight


def local_layer_config(layer: LayerConfig, shard: Shard | None) -> LayerConfig:
    """What a rank has of a layer: whole groups of heads, and a run of the feed-forward, as of the target's."""
    if shard is None:
        return layer
    heads, kv_heads, ffn = (len(deal(layer)) for deal in (shard.heads, shard.kv_heads, shard.ffn))
    return replace(layer, heads=heads, kv_heads=kv_heads, ffn=ffn)


def _table(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns), requires_grad=False)
