"""The rules `rejection` and `block` for many chains at once; each decides as its definition does by the same noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from foretell.types import Draft

from .rejection import LARGEST_RATIO, guess_of, is_drawn


@dataclass(frozen=True)
class Chains:
    """Drafts without branches side by side, padded to the longest; what lies behind a draft's end is not read."""

    tokens: Tensor  # [batch, width]
    lengths: Tensor  # [batch]
    target: Tensor  # [batch, width + 1, vocab]: the target's distributions, row 0 after the root
    draft: Tensor | None  # [batch, width, vocab]: what each node was drawn from; None: no node was drawn at random

    @classmethod
    def of(cls, drafts: list[Draft], probs: Tensor) -> Chains:
        """probs [nodes + drafts, vocab] are the target's rows, draft after draft, the row after the root first."""
        assert all(draft.is_chain for draft in drafts), "a tree is judged by itself"
        lengths = [len(draft) for draft in drafts]
        tokens = [torch.tensor(draft.tokens, dtype=torch.int64, device=probs.device) for draft in drafts]
        return cls(
            pad_sequence(tokens, batch_first=True),
            torch.tensor(lengths, device=probs.device),
            _padded(probs, [length + 1 for length in lengths]),
            _guesses(drafts, probs),
        )

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def nodes(self) -> Tensor:
        return torch.arange(self.width, device=self.tokens.device)

    @property
    def inside(self) -> Tensor:
        """Which nodes exist, [batch, width]."""
        return self.nodes < self.lengths[:, None]


@dataclass(frozen=True)
class Verdicts:
    """How many nodes of each chain stand, and the token that follows them."""

    accepted: Tensor  # [batch]
    next_tokens: Tensor  # [batch]


def rejection(chains: Chains, coins: Tensor, race: Tensor) -> Verdicts:
    """coins [batch, width] are uniforms, one a node; race [batch, vocab] exponentials for the token that follows."""
    stands = (coins < _ratios(chains)) & chains.inside
    accepted = stands.long().cumprod(1).sum(1)
    return _finish(chains, accepted, torch.ones_like(accepted, dtype=torch.float64), race)


def block(chains: Chains, coins: Tensor, race: Tensor) -> Verdicts:
    """As `rejection`; the last node that stands takes those before it along."""
    weights = _weights(_ratios(chains))
    stands = (coins < _shares(chains, weights)) & chains.inside
    accepted = pad(stands * (chains.nodes + 1), (1, 0)).amax(1)
    at_end = pad(weights, (1, 0), value=1.0).gather(1, accepted[:, None])[:, 0]
    return _finish(chains, accepted, at_end, race)


def _padded(rows: Tensor, lengths: list[int]) -> Tensor:
    """Rows of all sequences, one after the other -> [batch, longest, vocab]; a view where all are equally long."""
    if len(set(lengths)) == 1:
        return rows.reshape(len(lengths), lengths[0], -1)
    return pad_sequence(list(torch.split(rows, lengths)), batch_first=True)


def _guesses(drafts: list[Draft], like: Tensor) -> Tensor | None:
    """[batch, width, vocab], one-hot for a node that was not drawn at random."""
    if not any(is_drawn(draft, node) for draft in drafts for node in range(len(draft))):
        return None
    guesses = pad_sequence([_rows(draft, like) for draft in drafts], batch_first=True)
    for i, draft in enumerate(drafts):
        for node in range(len(draft)):
            if not is_drawn(draft, node):
                guesses[i, node] = guess_of(draft, node, guesses[i, node])
    return guesses


def _rows(draft: Draft, like: Tensor) -> Tensor:
    if draft.probs is None:
        return like.new_zeros(len(draft), like.shape[1])
    exact = torch.promote_types(draft.probs.dtype, like.dtype) == like.dtype
    assert exact, "a guess is judged by the very distribution it was drawn from, so rounding it would be a bias"
    return draft.probs.to(like)


def _ratios(chains: Chains) -> Tensor:
    """How many times likelier the target finds each token than its drafter did, [batch, width] in float64."""
    wanted = _at(chains.target[:, :-1], chains.tokens)
    if chains.draft is None:
        return wanted
    offered = _at(chains.draft, chains.tokens)
    return torch.where(offered > 0, wanted / offered, (wanted > 0).double()).clamp_max(LARGEST_RATIO)


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(2, tokens[:, :, None])[:, :, 0].double()


def _weights(ratios: Tensor) -> Tensor:
    """Products of the ratios along each chain, cut to 1 wherever they go above, [batch, width].

    The least of the products that start at each place is that same number and needs no loop; where products are made
    in order, as on a CPU, to the last bit.
    """
    width = ratios.shape[1]
    grid = ratios[:, None].expand(-1, width, width)
    begun = torch.ones(width, width, dtype=torch.bool, device=ratios.device).triu()
    products = torch.where(begun, grid, 1.0).cumprod(2).nan_to_num(nan=0.0)  # infinity * 0, where the chain has died
    return pad(products, (0, 0, 1, 0), value=1.0).amin(1)


def _shares(chains: Chains, weights: Tensor) -> Tensor:
    """The probability that each node stands once those behind it have fallen, [batch, width]."""
    rest = _rest_behind(chains, weights[:, :-1])
    whole = rest + (1.0 - weights[:, :-1])
    shares = torch.cat([torch.where(whole > 0, rest / whole, 1.0), weights[:, -1:]], 1)
    return torch.where(chains.nodes == chains.lengths[:, None] - 1, weights, shares)


def _rest_behind(chains: Chains, weights: Tensor) -> Tensor:
    """What the next node leaves of the weighted target, summed over the vocabulary, [batch, width - 1]."""
    target = chains.target[:, 1:-1]
    if chains.draft is None:
        return weights * (target.sum(-1, dtype=torch.float64) - _at(target, chains.tokens[:, 1:]))
    return target.to(torch.float64, copy=True).mul_(weights[:, :, None]).sub_(chains.draft[:, 1:]).clamp_min_(0).sum(-1)


def _finish(chains: Chains, accepted: Tensor, weights: Tensor, race: Tensor) -> Verdicts:
    """Draw the token after `accepted` nodes from what the first fallen node left, or from all of the target."""
    batch = torch.arange(len(accepted), device=accepted.device)
    left = chains.target[batch, accepted].double()
    if chains.width:
        fallen = accepted.clamp_max(chains.width - 1)
        rest = _minus_guess(chains, left * weights[:, None], batch, fallen)
        left = torch.where(((accepted < chains.lengths) & (rest.sum(1) > 0))[:, None], rest, left)
    return Verdicts(accepted, (left / race).argmax(1))


def _minus_guess(chains: Chains, weighted: Tensor, batch: Tensor, node: Tensor) -> Tensor:
    if chains.draft is None:
        return weighted.scatter_(1, chains.tokens[batch, node][:, None], 0.0)
    return weighted.sub_(chains.draft[batch, node]).clamp_min_(0)
