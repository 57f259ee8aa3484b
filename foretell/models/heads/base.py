"""What all heads have in common: what they borrow of the target, what they speak of, and their file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm

from ..decoder import Decoder
from ..layers import Linear
from ..rope import rope_table
from .config import HeadConfig
from .layer import Turn, initialise

Settings = TypeVar("Settings", bound=HeadConfig)


@dataclass(frozen=True)
class Lender:
    """What a head may borrow: the target's embedding, its output rows and its last norm."""

    embed: Tensor  # [vocab, target width]
    output: Tensor  # [vocab, target width]
    norm: Tensor  # [target width]
    norm_eps: float

    @classmethod
    def of(cls, target: Decoder) -> Lender:
        """Of a target whose weights are not packed away yet."""
        output = target.embed if target.config.tied else target.head.weight
        assert output is not None, "borrow before the target is prepared"
        return cls(target.embed.data, output.data, target.norm.weight.data, target.config.norm_eps)


class Head(nn.Module, Generic[Settings]):
    """Borrowed tensors are buffers outside the state dict: they are neither trained nor written."""

    draft_ids: Tensor  # [outputs], rising: the target's token for each of the head's own
    like: Tensor

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        width = config.layer.width
        ids = torch.arange(config.outputs, device="cpu")  # of shapes alone it would be made by symbols: half a second
        self.register_buffer("draft_ids", ids, persistent=config.draft_vocab is not None)
        self.register_buffer("like", torch.zeros(0), persistent=False)  # has the type and device the head is in
        self.embed = nn.Parameter(torch.empty(config.vocab, width), requires_grad=False) if config.own_embed else None
        self.output = Linear(width, config.outputs)
        self.tap_norm: Tensor | None = None
        self.tap_eps = config.layer.norm_eps
        self._table: Tensor | None = None
        self._lent: Tensor | None = None

    @property
    def lacks(self) -> tuple[str, ...]:
        """Parameters that are borrowed, which no file of a head's own has."""
        return () if self.config.own_output else ("output.weight",)

    def borrow(self, lender: Lender) -> None:
        """Take from the target what this head does not have itself; set `draft_ids` and the device before."""
        if not self.config.own_embed:
            assert lender.embed.shape == (self.config.vocab, self.config.layer.width), "an embedding that fits"
            self._lent = lender.embed
        if not self.config.own_output:
            rows = lender.output if self.config.draft_vocab is None else lender.output[self.draft_ids]
            self.output.weight = nn.Parameter(rows.to(self.like), requires_grad=False)
        if self.config.target_norm:
            self.tap_norm, self.tap_eps = lender.norm.to(self.like), lender.norm_eps

    def start(self, generator: torch.Generator) -> None:
        """Weights to start training from."""
        initialise(self, generator, self.lacks)

    def trained(self) -> list[nn.Parameter]:
        """What training may change, ready for it: all but what is the target's."""
        found = [each for name, each in self.named_parameters() if name not in (*self.lacks, "embed")]
        for parameter in found:
            parameter.requires_grad_(True)
        return found

    @property
    def bytes(self) -> int:
        """What its weights take, without what is borrowed."""
        linears = [module for name, module in self.named_modules() if isinstance(module, Linear) and name != "output"]
        packed = sum(module.native.bytes for module in linears if module.native is not None)
        return packed + sum(tensor.nbytes for tensor in self.own_state().values())

    def own_state(self) -> dict[str, Tensor]:
        """What a file of this head has: all that is not borrowed."""
        return {name: tensor for name, tensor in self.state_dict().items() if name not in self.lacks}

    def prepare(self, context: int) -> None:
        """Make the table of turns for places up to `context`."""
        device, layer = self.draft_ids.device, self.config.layer
        self._table = rope_table(layer.rope, layer.head_dim, context).to(device, self.like.dtype)

    @property
    def table(self) -> Tensor:
        """Cosines and sines of each place, [places, 2, head_dim]."""
        assert self._table is not None, "prepare first"
        return self._table

    @property
    def embedding(self) -> Tensor:
        """[vocab, width], its own or the target's."""
        table = self.embed if self.embed is not None else self._lent
        assert table is not None, "borrow first"
        return table

    def turn(self, positions: Tensor) -> Turn:
        """How rows at these positions are turned."""
        rows = self.table[positions]
        return rows[..., :1, :], rows[..., 1:, :]

    def turn_behind(self, positions: Tensor) -> Turn:
        """The same where texts are guessed for together, and one comes to its end before another has all its guesses:
        what is guessed behind the end is dropped, and only has to be turned by something."""
        return self.turn(positions.clamp_max(len(self.table) - 1))

    def embedded(self, tokens: Tensor) -> Tensor:
        """[..., width], for the target's tokens."""
        rows = F.embedding(tokens, self.embedding).to(self.like.dtype)
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def tapped(self, features: Tensor) -> Tensor:
        """Features [..., taps * target width] behind the target's last norm, where this head wants them so."""
        if not self.config.target_norm:
            return features
        assert self.tap_norm is not None, "borrow first"
        return rms_norm(features, self.tap_norm, self.tap_eps)

    def scores(self, normed: Tensor) -> Tensor:
        """[..., width] -> [..., outputs] in float32, over `draft_ids`."""
        rows: Tensor = self.output(normed.reshape(-1, normed.shape[-1]))
        return rows.float().view(*normed.shape[:-1], -1)

    def spread(self, logits: Tensor) -> Tensor:
        """Scores over all of the target's tokens: those the head cannot guess have none."""
        if self.config.draft_vocab is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab), float("-inf"))
        return whole.index_copy_(-1, self.draft_ids, logits)
