"""Block heads: a whole block of guesses in one pass, over keys and values made of the target's features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.models.layers import Linear, Norm
from foretell.models.sharding import Shard

from .base import DraftHead, norm_each
from .config import BlockConfig
from .layer import Attend, HeadLayer, RopeRows


class BlockHead(DraftHead[BlockConfig]):
    """What was read is kept as keys and values of a place's features, and of the tokens up to it where the head looks
    back; a block's own are dropped after its pass."""

    def __init__(self, config: BlockConfig, shard: Shard | None = None) -> None:
        super().__init__(config, shard)
        width = config.layer.width
        self.fc = Linear(config.input_width, len(self.local_columns))
        self.hints = Linear(width, config.target_width // config.look_back) if config.look_back else None
        given = config.input_width // config.target_width
        self.tap_norms = nn.ModuleList(Norm(config.target_width) for _ in range(given if config.fc_norm else 0))
        self.feature_norm = Norm(width)
        self.layers = nn.ModuleList(HeadLayer(self.local, i) for i in range(config.layers))
        self.norm = Norm(width)
        masks = torch.zeros(*([config.block - 1] if config.anchored else []), width)
        self.mask = nn.Parameter(masks, requires_grad=False) if config.mask_token is None else None
        rank = config.markov_rank
        markov = torch.empty(len(self.local_tokens) if rank else 0, rank)
        self.markov_in = nn.Parameter(markov, requires_grad=False) if rank else None
        self.markov_out = Linear(rank, len(self.local_outputs)) if rank else None
        seen = width + (rank if config.confidence_with_markov else 0)
        self.surety = Linear(seen, 1, bias=True) if config.confidence else None

    def prepare(self, context: int) -> None:
        """Make the table of turns for places up to `context`, and for those of a block behind it."""
        super().prepare(context + self.config.block)

    def with_token_hints(self, features: Tensor, tokens: Tensor) -> Tensor:
        """What this head is given of all places of texts, [..., length, read width]; tokens are [..., length]."""
        return torch.cat([features, self.token_hints(tokens)], -1) if self.config.look_back else features

    def token_hints(self, tokens: Tensor) -> Tensor:
        """What is known beside the features of all places of texts [..., length], [..., length, target width]: a short
        word for each token, of a place's own and of those before it side by side. By them a place is found that stands
        so far behind a token."""
        words, length = self._words(tokens), tokens.shape[-1]
        return torch.cat([F.pad(words, (0, 0, by, 0))[..., :length, :] for by in range(self.config.look_back)], -1)

    def _words(self, tokens: Tensor) -> Tensor:
        assert self.hints is not None, "asked of a head that looks back"
        words: Tensor = self.hints(self.embed_tokens(tokens).flatten(0, -2))
        return words.view(*tokens.shape, -1)

    def fuse(self, features: Tensor) -> Tensor:
        """What is given of places [..., read width] as what layers make keys and values of, [..., width]."""
        assert features.shape[-1] == self.config.input_width, "with what is known beside them"
        return self.normalize_projected(self.local_hidden(features))

    def local_hidden(self, features: Tensor) -> Tensor:
        """Of features alone what stands beside them is still to come, by `hinted`."""
        return self._projected(
            F.pad(self.normalize_hidden(features), (0, self.config.input_width - features.shape[-1]))
        )

    def project_hints(self, tokens: Tensor) -> Tensor:
        """What the tokens of places, each one's own and those before it, [..., look back], -1 for none, add to what is
        kept here of features alone."""
        words = self._words(tokens.clamp_min(0)).masked_fill((tokens < 0)[..., None], 0.0).flatten(-2)
        return self._projected(F.pad(words, (self.config.input_width - words.shape[-1], 0)))

    def _projected(self, given: Tensor) -> Tensor:
        """A sum over its parts, of which some may be zeros."""
        parts = norm_each(given, self.tap_norms, self.config.layer.norm_eps) if self.config.fc_norm else given
        made: Tensor = self.fc(parts)
        return made

    def normalize_projected(self, kept: Tensor) -> Tensor:
        """The same of what ranks kept, [..., columns here]."""
        return rms_norm(self.gather_columns(kept), self.feature_norm.weight, self.config.layer.norm_eps)

    def context_kv(self, fused: Tensor, turn: RopeRows) -> list[tuple[Tensor, Tensor]]:
        """For each layer keys and values of places that were read."""
        # No norm of the layer's stands before them: the features were normed once, for all layers.
        return [_layer(layer).attention.keys_values(fused, turn) for layer in self.layers]

    def forward(self, anchors: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        """Normed states [..., block, width] behind anchors [...]; `turn` is of the block's places, [..., block, ..].

        `attend` shows each row what was read and its block: all of it, or what lies before where `causal_in_block`.
        """
        return self.run_layers(self.block_inputs(anchors), turn, attend)

    def block_inputs(self, anchors: Tensor) -> Tensor:
        """What a pass starts from, [..., block, width]."""
        return self.block_inputs_with(anchors, self.mask if self.mask is not None else self.mask_embeddings)

    def block_inputs_with(self, anchors: Tensor, filler: Tensor) -> Tensor:
        """The same where `filler` was asked for before."""
        first = self.embed_tokens(anchors)[..., None, :]
        masks = filler.expand(*anchors.shape, self.config.block - 1, -1)
        return torch.cat([first, masks + first if self.config.anchored else masks], -2)

    def run_layers(self, x: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        """Rows through the layers; how they are laid out is the caller's affair."""
        for layer in self.layers:
            x = layer(x, turn, attend)
        return rms_norm(x, self.norm.weight, self.config.layer.norm_eps)

    def draft_states(self, states: Tensor) -> Tensor:
        """Of a block's states those that guess, [..., drafts, width]."""
        return states if self.config.sample_from_anchor else states[..., 1:, :]

    def logits(self, states: Tensor, before: Tensor | None = None) -> Tensor:
        """[..., outputs here], over `draft_ids`; `before` are the tokens one place before, for a Markov head."""
        scores = self.output_logits(states)
        return scores if before is None or self.markov_out is None else scores + self.markov_logits(before)

    def markov_logits(self, before: Tensor) -> Tensor:
        """What a Markov head adds to the scores behind these tokens, [..., outputs here]."""
        assert self.markov_out is not None, "there is a Markov head"
        added: Tensor = self.markov_out(self._markov(before))
        return added.float()

    def confidence_logits(self, states: Tensor, before: Tensor) -> Tensor:
        """How likely the guess of each state is to stand, where `before` is the token before it; as a logit, [...]."""
        assert self.surety is not None, "there is a confidence head"
        if self.config.confidence_with_markov:
            states = torch.cat([states, self._markov(before)], -1)
        logit: Tensor = self.surety(states)
        return logit[..., 0].float()

    @property
    def confidence_weights(self) -> tuple[Tensor, float] | None:
        """What the confidence head multiplies with, [width or width + rank], and its bias."""
        if self.surety is None or self.surety.weight is None or self.surety.bias is None:
            return None
        return self.surety.weight.data[0].contiguous(), float(self.surety.bias)

    def _markov(self, before: Tensor) -> Tensor:
        assert self.markov_in is not None, "there is a Markov head"
        return self.lookup_rows(before, self.markov_in)

    @property
    def mask_embeddings(self) -> Tensor:
        """What stands in places to be filled, [width], or of each of them, [block - 1, width]."""
        if self.mask is not None:
            return self.mask.data
        assert self.config.mask_token is not None, "one of both is there"
        return self.embed_tokens(torch.tensor(self.config.mask_token, device=self.like.device))


def _layer(layer: nn.Module) -> HeadLayer:
    assert isinstance(layer, HeadLayer), "a head is made of layers"
    return layer
