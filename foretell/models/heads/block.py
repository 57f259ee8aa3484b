"""Block heads: a whole block of guesses in one pass, over keys and values made of the target's features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm

from ..layers import Linear, Norm
from ..shard import Shard
from .base import Head
from .config import BlockConfig
from .layer import Attend, HeadLayer, Turn


class BlockHead(Head[BlockConfig]):
    """What was read is kept as keys and values of its features alone; a block's own are dropped after its pass."""

    def __init__(self, config: BlockConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width = config.layer.width
        self.fc = Linear(len(config.taps) * config.target_width, len(self.columns_here))
        self.feature_norm = Norm(width)
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(width)
        self.mask = nn.Parameter(torch.zeros(width), requires_grad=False) if config.mask_token is None else None
        rank = config.markov_rank
        markov = torch.empty(len(self.tokens_here) if rank else 0, rank)
        self.markov_in = nn.Parameter(markov, requires_grad=False) if rank else None
        self.markov_out = Linear(rank, len(self.outputs_here)) if rank else None
        seen = width + (rank if config.confidence_with_markov else 0)
        self.surety = Linear(seen, 1, bias=True) if config.confidence else None

    def prepare(self, context: int) -> None:
        """Make the table of turns for places up to `context`, and for those of a block behind it."""
        super().prepare(context + self.config.block)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., taps * target width] as what layers make keys and values of, [..., width]."""
        return self.normed_feature(self.kept(features))

    def kept(self, features: Tensor) -> Tensor:
        made: Tensor = self.fc(self.tapped(features))
        return made

    def normed_feature(self, kept: Tensor) -> Tensor:
        """The same of what ranks kept, [..., columns here]."""
        return rms_norm(self.whole(kept), self.feature_norm.weight, self.config.layer.norm_eps)

    def remember(self, fused: Tensor, turn: Turn) -> list[tuple[Tensor, Tensor]]:
        """For each layer keys and values of places that were read."""
        # No norm of the layer's stands before them: the features were normed once, for all layers.
        return [_layer(layer).attention.remember(fused, turn) for layer in self.layers]

    def forward(self, anchors: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """Normed states [..., block, width] behind anchors [...]; `turn` is of the block's places, [..., block, ..].

        `attend` shows each row what was read and its block: all of it, or what lies before where `causal_in_block`.
        """
        return self.run(self.enter(anchors), turn, attend)

    def enter(self, anchors: Tensor) -> Tensor:
        """What a pass starts from, [..., block, width]."""
        return torch.cat([self.embedded(anchors)[..., None, :], self._masks(anchors)], -2)

    def run(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """Rows through the layers; how they are laid out is the caller's affair."""
        for layer in self.layers:
            x = layer(x, turn, attend)
        return rms_norm(x, self.norm.weight, self.config.layer.norm_eps)

    def guessing(self, states: Tensor) -> Tensor:
        """Of a block's states those that guess, [..., drafts, width]."""
        return states if self.config.sample_from_anchor else states[..., 1:, :]

    def logits(self, states: Tensor, before: Tensor | None = None) -> Tensor:
        """[..., outputs here], over `draft_ids`; `before` are the tokens one place before, for a Markov head."""
        scores = self.scores(states)
        return scores if before is None or self.markov_out is None else scores + self.nudge(before)

    def nudge(self, before: Tensor) -> Tensor:
        """What a Markov head adds to the scores behind these tokens, [..., outputs here]."""
        assert self.markov_out is not None, "there is a Markov head"
        added: Tensor = self.markov_out(self._markov(before))
        return added.float()

    def sure(self, states: Tensor, before: Tensor) -> Tensor:
        """How likely the guess of each state is to stand, where `before` is the token before it; as a logit, [...]."""
        assert self.surety is not None, "there is a confidence head"
        if self.config.confidence_with_markov:
            states = torch.cat([states, self._markov(before)], -1)
        logit: Tensor = self.surety(states)
        return logit[..., 0].float()

    @property
    def surety_weights(self) -> tuple[Tensor, float] | None:
        """What the confidence head multiplies with, [width or width + rank], and its bias."""
        if self.surety is None or self.surety.weight is None or self.surety.bias is None:
            return None
        return self.surety.weight.data[0].contiguous(), float(self.surety.bias)

    def _markov(self, before: Tensor) -> Tensor:
        assert self.markov_in is not None, "there is a Markov head"
        return self.looked_up(before, self.markov_in)

    @property
    def filler(self) -> Tensor:
        """What stands in a place to be filled, [width]."""
        if self.mask is not None:
            return self.mask.data
        assert self.config.mask_token is not None, "one of both is there"
        return self.embedded(torch.tensor(self.config.mask_token, device=self.like.device))

    def _masks(self, anchors: Tensor) -> Tensor:
        mask = self.mask if self.mask is not None else self.filler
        return mask.expand(*anchors.shape, self.config.block - 1, -1)


def _layer(layer: nn.Module) -> HeadLayer:
    assert isinstance(layer, HeadLayer), "a head is made of layers"
    return layer
