"""The rules `rejection` and `block` for a batch of chains.

Each chain gets the result that the reference in `rejection.py` or `block.py` gives for the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from foretell.types import Draft

from .rejection import MAX_RATIO, draft_distribution


@dataclass(frozen=True)
class ChainBatch:
    """Drafts without branches, padded to the longest. Results do not depend on the padding."""

    tokens: Tensor  # [batch, width]
    lengths: Tensor  # [batch]
    target: Tensor  # [batch, width + 1, vocab]: the target's distributions, row 0 after the root
    draft: Tensor | None  # [batch, width, vocab]: what each node was sampled from; None if no node was sampled

    @classmethod
    def of(cls, drafts: list[Draft], probs: Tensor) -> ChainBatch:
        """Build a batch; `probs` [nodes + drafts, vocab] are the target's rows of each draft, root row first."""
        assert all(draft.is_chain for draft in drafts), "trees are verified one by one"
        lengths = [len(draft) for draft in drafts]
        tokens = [torch.tensor(draft.tokens, dtype=torch.int64, device=probs.device) for draft in drafts]
        return cls(
            tokens=pad_sequence(tokens, batch_first=True),
            lengths=torch.tensor(lengths, device=probs.device),
            target=_padded(probs, [length + 1 for length in lengths]),
            draft=_draft_distributions(drafts, probs),
        )

    @property
    def width(self) -> int:
        """Return the length of the longest chain."""
        return self.tokens.shape[1]

    @property
    def nodes(self) -> Tensor:
        """Return the node indices [width]."""
        return torch.arange(self.width, device=self.tokens.device)

    @property
    def mask(self) -> Tensor:
        """Return which nodes exist, [batch, width]; the others are padding."""
        return self.nodes < self.lengths[:, None]


@dataclass(frozen=True)
class ChainResults:
    """Number of accepted nodes of each chain, and the token after them."""

    accepted: Tensor  # [batch]
    next_tokens: Tensor  # [batch]


def rejection(chains: ChainBatch, uniforms: Tensor, exponentials: Tensor) -> ChainResults:
    """Verify by speculative sampling.

    `uniforms` [batch, width] has one number per node; `exponentials` [batch, vocab] decide the token that follows.
    """
    accepts = (uniforms < _ratios(chains)) & chains.mask
    accepted = accepts.long().cumprod(1).sum(1)
    return _finish(chains, accepted, torch.ones_like(accepted, dtype=torch.float64), exponentials)


def block(chains: ChainBatch, uniforms: Tensor, exponentials: Tensor) -> ChainResults:
    """Verify by block verification: the last accepted node accepts all before it. Arguments are as in `rejection`."""
    weights = _weights(_ratios(chains))
    accepts = (uniforms < _acceptance_probabilities(chains, weights)) & chains.mask
    accepted = pad(accepts * (chains.nodes + 1), (1, 0)).amax(1)
    last_weight = pad(weights, (1, 0), value=1.0).gather(1, accepted[:, None])[:, 0]
    return _finish(chains, accepted, last_weight, exponentials)


def _padded(rows: Tensor, lengths: list[int]) -> Tensor:
    """Split concatenated rows into [batch, longest, vocab]; a view where all lengths are equal."""
    if len(set(lengths)) == 1:
        return rows.reshape(len(lengths), lengths[0], -1)
    return pad_sequence(list(torch.split(rows, lengths)), batch_first=True)


def _draft_distributions(drafts: list[Draft], like: Tensor) -> Tensor | None:
    """Return [batch, width, vocab], one-hot for a node that was not sampled; None if no node was sampled."""
    if not any(draft.is_sampled(node) for draft in drafts for node in range(len(draft))):
        return None
    rows = pad_sequence([_rows(draft, like) for draft in drafts], batch_first=True)
    for i, draft in enumerate(drafts):
        for node in range(len(draft)):
            if not draft.is_sampled(node):
                rows[i, node] = draft_distribution(draft, node, rows[i, node])
    return rows


def _rows(draft: Draft, like: Tensor) -> Tensor:
    if draft.probs is None:
        return like.new_zeros(len(draft), like.shape[1])
    exact = torch.promote_types(draft.probs.dtype, like.dtype) == like.dtype
    assert exact, "verification needs the exact distribution a token was sampled from; a narrower dtype biases it"
    return draft.probs.to(like)


def _ratios(chains: ChainBatch) -> Tensor:
    """Return p / q of each draft token, [batch, width] in float64, as `acceptance_ratio` does."""
    p = _at(chains.target[:, :-1], chains.tokens)
    if chains.draft is None:
        return p
    q = _at(chains.draft, chains.tokens)
    return torch.where(q > 0, p / q, (p > 0).double()).clamp_max(MAX_RATIO)


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    """Gather the probabilities of tokens [batch, width] in float64."""
    return probs.gather(2, tokens[:, :, None])[:, :, 0].double()


def _weights(ratios: Tensor) -> Tensor:
    """Return the products of the ratios along each chain, clipped to 1 at every node, [batch, width].

    The minimum over the products that start at each position is the same number and needs no loop; it is equal to the
    last bit where products are computed in order, as on a CPU.
    """
    width = ratios.shape[1]
    grid = ratios[:, None].expand(-1, width, width)
    started = torch.ones(width, width, dtype=torch.bool, device=ratios.device).triu()
    products = torch.where(started, grid, 1.0).cumprod(2).nan_to_num(nan=0.0)  # infinity * 0 after a ratio of 0
    return pad(products, (0, 0, 1, 0), value=1.0).amin(1)


def _acceptance_probabilities(chains: ChainBatch, weights: Tensor) -> Tensor:
    """Return the probability that each node is accepted once those after it were rejected, [batch, width]."""
    residual = _residual_sums(chains, weights[:, :-1])
    total = residual + (1.0 - weights[:, :-1])
    inner = torch.cat([torch.where(total > 0, residual / total, 1.0), weights[:, -1:]], 1)
    return torch.where(chains.nodes == chains.lengths[:, None] - 1, weights, inner)


def _residual_sums(chains: ChainBatch, weights: Tensor) -> Tensor:
    """Return sum over x of max(weight * p(x) - q(x), 0) at the next node, [batch, width - 1]."""
    target = chains.target[:, 1:-1]
    if chains.draft is None:
        return weights * (target.sum(-1, dtype=torch.float64) - _at(target, chains.tokens[:, 1:]))
    return target.to(torch.float64, copy=True).mul_(weights[:, :, None]).sub_(chains.draft[:, 1:]).clamp_min_(0).sum(-1)


def _finish(chains: ChainBatch, accepted: Tensor, weights: Tensor, exponentials: Tensor) -> ChainResults:
    """Sample the token after `accepted` nodes by an exponential race.

    It comes from the residual of the first rejected node, or from the target if every node was accepted.
    """
    batch = torch.arange(len(accepted), device=accepted.device)
    probs = chains.target[batch, accepted].double()
    if chains.width:
        rejected = accepted.clamp_max(chains.width - 1)
        residual = _subtract_draft(chains, probs * weights[:, None], batch, rejected)
        probs = torch.where(((accepted < chains.lengths) & (residual.sum(1) > 0))[:, None], residual, probs)
    return ChainResults(accepted, (probs / exponentials).argmax(1))


def _subtract_draft(chains: ChainBatch, weighted: Tensor, batch: Tensor, node: Tensor) -> Tensor:
    """Compute max(weighted - q, 0) in place, q being the distribution of one node per chain."""
    if chains.draft is None:
        return weighted.scatter_(1, chains.tokens[batch, node][:, None], 0.0)
    return weighted.sub_(chains.draft[batch, node]).clamp_min_(0)
