"""Block heads (DFlash, DSpark): a block of draft tokens in one pass, over KV of the target's hidden states."""

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
    """A block head. It caches keys and values of projected hidden states, with token hints if it has `look_back`.

    The keys and values of the block itself are dropped after its pass.
    """

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
        inputs = width + (rank if config.confidence_with_markov else 0)
        self.surety = Linear(inputs, 1, bias=True) if config.confidence else None

    def prepare(self, context: int) -> None:
        """Build the RoPE table for positions up to `context` and a block after it."""
        super().prepare(context + self.config.block)

    def with_token_hints(self, hidden_states: Tensor, tokens: Tensor) -> Tensor:
        """Return the inputs [..., length, input width] of all positions of sequences with tokens [..., length]."""
        return torch.cat([hidden_states, self.token_hints(tokens)], -1) if self.config.look_back else hidden_states

    def token_hints(self, tokens: Tensor) -> Tensor:
        """Return token hints [..., length, target width] for tokens [..., length].

        The hint of a position is the concatenation of short embeddings of its token and those before it, so that
        attention can find a position by its distance from a token (to copy).
        """
        words, length = self._words(tokens), tokens.shape[-1]
        return torch.cat([F.pad(words, (0, 0, by, 0))[..., :length, :] for by in range(self.config.look_back)], -1)

    def _words(self, tokens: Tensor) -> Tensor:
        assert self.hints is not None, "the head has look_back"
        words: Tensor = self.hints(self.embed_tokens(tokens).flatten(0, -2))
        return words.view(*tokens.shape, -1)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Project inputs [..., input width] to what layers compute keys and values from, [..., width]."""
        assert hidden_states.shape[-1] == self.config.input_width, "inputs include token hints"
        return self.normalize_projected(self.local_hidden(hidden_states))

    def local_hidden(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's projection of hidden states; `project_hints` adds that of the token hints."""
        return self._projected(
            F.pad(self.normalize_hidden(hidden_states), (0, self.config.input_width - hidden_states.shape[-1]))
        )

    def project_hints(self, tokens: Tensor) -> Tensor:
        """Return the projection of token hints, tokens [..., look_back] with -1 for none, to add to `local_hidden`."""
        words = self._words(tokens.clamp_min(0)).masked_fill((tokens < 0)[..., None], 0.0).flatten(-2)
        return self._projected(F.pad(words, (self.config.input_width - words.shape[-1], 0)))

    def _projected(self, given: Tensor) -> Tensor:
        """Project inputs, parts of which may be zero, so that projections of parts can be added."""
        parts = norm_each(given, self.tap_norms, self.config.layer.norm_eps) if self.config.fc_norm else given
        made: Tensor = self.fc(parts)
        return made

    def normalize_projected(self, kept: Tensor) -> Tensor:
        """Gather the projections of all ranks, [..., local columns], and normalize them."""
        return rms_norm(self.gather_columns(kept), self.feature_norm.weight, self.config.layer.norm_eps)

    def context_kv(self, fused: Tensor, rope_rows: RopeRows) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of the context for each layer."""
        # Without the norm of the layer: the hidden states were normalized once for all layers.
        return [_layer(layer).attention.keys_values(fused, rope_rows) for layer in self.layers]

    def forward(self, anchors: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        """Return normalized states [..., block, width] for anchors [...]; `rope_rows` has RoPE rows [..., block, ..].

        `attend` lets each row see the context and its block, causally if `causal_in_block`.
        """
        return self.run_layers(self.block_inputs(anchors), rope_rows, attend)

    def block_inputs(self, anchors: Tensor) -> Tensor:
        """Return the input of a pass, [..., block, width]."""
        return self.block_inputs_with(anchors, self.mask if self.mask is not None else self.mask_embeddings)

    def block_inputs_with(self, anchors: Tensor, mask_rows: Tensor) -> Tensor:
        """Return the input of a pass with precomputed mask embeddings."""
        first = self.embed_tokens(anchors)[..., None, :]
        masks = mask_rows.expand(*anchors.shape, self.config.block - 1, -1)
        return torch.cat([first, masks + first if self.config.anchored else masks], -2)

    def run_layers(self, x: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        """Run the layers and the final norm over rows in any layout."""
        for layer in self.layers:
            x = layer(x, rope_rows, attend)
        return rms_norm(x, self.norm.weight, self.config.layer.norm_eps)

    def draft_states(self, states: Tensor) -> Tensor:
        """Return the states of a block that predict draft tokens, [..., drafts, width]."""
        return states if self.config.sample_from_anchor else states[..., 1:, :]

    def logits(self, states: Tensor, before: Tensor | None = None) -> Tensor:
        """Return logits [..., local outputs] over `draft_ids`; `before` are previous tokens, for the Markov head."""
        scores = self.output_logits(states)
        return scores if before is None or self.markov_out is None else scores + self.markov_logits(before)

    def markov_logits(self, before: Tensor) -> Tensor:
        """Return the logits that the Markov head adds after these tokens, [..., local outputs]."""
        assert self.markov_out is not None, "there is a Markov head"
        added: Tensor = self.markov_out(self._markov(before))
        return added.float()

    def confidence_logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the logit of the acceptance probability of each draft token; `before` are the previous tokens."""
        assert self.surety is not None, "there is a confidence head"
        if self.config.confidence_with_markov:
            states = torch.cat([states, self._markov(before)], -1)
        logit: Tensor = self.surety(states)
        return logit[..., 0].float()

    @property
    def confidence_weights(self) -> tuple[Tensor, float] | None:
        """Return the weights of the confidence head, [width or width + rank], and its bias."""
        if self.surety is None or self.surety.weight is None or self.surety.bias is None:
            return None
        return self.surety.weight.data[0].contiguous(), float(self.surety.bias)

    def _markov(self, before: Tensor) -> Tensor:
        assert self.markov_in is not None, "there is a Markov head"
        return self.lookup_rows(before, self.markov_in)

    @property
    def mask_embeddings(self) -> Tensor:
        """Return the embedding of masked positions, [width] or [block - 1, width]."""
        if self.mask is not None:
            return self.mask.data
        assert self.config.mask_token is not None, "there is a mask or a mask token"
        return self.embed_tokens(torch.tensor(self.config.mask_token, device=self.like.device))


def _layer(layer: nn.Module) -> HeadLayer:
    assert isinstance(layer, HeadLayer), "a head is made of layers"
    return layer
