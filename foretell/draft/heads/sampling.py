"""Samples draft tokens from logits: one per sequence for chains, several per node for trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from foretell.draft.draft_builder import DraftTokens
from foretell.draft.heads.tree import MAX_WIDTH, ROOT, Children, Tree
from foretell.sampling import noise
from foretell.sampling.native_sampler import native_sampler_for, pack_sampling_rows
from foretell.sampling.sampling import probabilities
from foretell.sampling_params import SamplingParams
from foretell.types import Sequence

DraftTemperature = Literal["fixed", "entropy"]
# With "entropy" the draft temperature is the request's times SHARPENING ** (1 / entropy), the entropy in nats.
SHARPENING = 0.8
MIN_ENTROPY = 1e-2  # nats
MIN_TEMPERATURE = 1e-3


def needs_draft_probs(seq: Sequence) -> bool:
    """Return whether the verify rule needs the distributions of draft tokens, so that they must be sampled from them.

    Under `match` the target's own noise decides, and greedy requests have no distribution.
    """
    return seq.request.params.temperature > 0 and seq.request.rule != "match"


def sample_draft_tokens(
    logits: Tensor,
    seqs: list[Sequence],
    offset: int,
    temperature: DraftTemperature = "fixed",
    ids: Tensor | None = None,
) -> DraftTokens:
    """Sample token `offset` of a draft chain for each sequence from logits [sequences, vocab].

    `ids` are the tokens of the columns, where the draft has a smaller vocabulary. Under `match` draft and target share
    the noise of a position (Gumbel-max coupling); the other rules need noise of the step's own.
    """
    probs = draft_probabilities(logits, [seq.request.params for seq in seqs], temperature)
    columns = torch.arange(probs.shape[-1], device=probs.device) if ids is None else ids
    best = (probs / _noise(seqs, offset, probs, columns)).argmax(-1)
    tokens: list[int] = columns[best].tolist()
    # The row of a greedy request is one-hot; its confidence is in the logits.
    greedy = torch.tensor([[seq.request.params.temperature == 0] for seq in seqs], device=probs.device)
    confidence = torch.where(greedy, logits.softmax(-1), probs) if greedy.any() else probs
    rows = torch.arange(len(seqs), device=best.device)
    return DraftTokens(tokens, confidence[rows, best].tolist(), probs)


def draft_probabilities(logits: Tensor, params: list[SamplingParams], temperature: DraftTemperature) -> Tensor:
    """Return the distributions to sample from, for logits [rows, tokens]."""
    return probabilities(logits, draft_params(logits, params, temperature))


def draft_params(logits: Tensor, params: list[SamplingParams], temperature: DraftTemperature) -> list[SamplingParams]:
    """Return the sampling parameters of each row, with the draft's temperature."""
    if temperature == "fixed":
        return params
    return [_sharpened(row, each) for row, each in zip(logits, params, strict=True)]


def _noise(seqs: list[Sequence], offset: int, like: Tensor, columns: Tensor) -> Tensor:
    """Return exponential noise, [sequences, columns]."""
    found = torch.empty_like(like)
    for shared in (True, False):
        rows = [i for i, seq in enumerate(seqs) if (seq.request.rule == "match") == shared]
        if rows:
            seeds = torch.tensor([seqs[i].request.seed for i in rows], device=like.device)
            roots = torch.tensor([len(seqs[i].tokens) for i in rows], device=like.device)
            if shared:
                found[rows] = noise.exponential(seeds, roots + offset, noise.TOKEN_STREAM, columns)
            else:
                found[rows] = noise.draft_noise(seeds, roots, offset, columns)
    return found


def _sharpened(logits: Tensor, params: SamplingParams) -> SamplingParams:
    """Lower the temperature where the draft has low entropy. The sharpened distribution is the q that the verifier
    gets, so the output distribution does not change."""
    if params.temperature == 0:
        return params
    probs = probabilities(logits[None], [SamplingParams(temperature=params.temperature)])
    entropy = float(-(probs * probs.clamp_min(1e-12).log()).sum())
    factor = SHARPENING ** (1.0 / max(entropy, MIN_ENTROPY))
    return replace(params, temperature=max(params.temperature * factor, MIN_TEMPERATURE))


@dataclass(frozen=True)
class TreeInProgress:
    """A sequence and its draft tree under construction."""

    seq: Sequence
    tree: Tree

    @property
    def shares_noise(self) -> bool:
        """Return whether the target samples with noise that the draft knows: under `match`."""
        return self.seq.request.params.temperature > 0 and self.seq.request.rule == "match"

    @property
    def position(self) -> int:
        """Position in the sequence of the next level's tokens."""
        return len(self.seq.tokens) + self.tree.depth

    def token(self, node: int) -> int:
        """Return the token of a node; that of the root is the sequence's last token."""
        return self.seq.tokens[-1] if node == ROOT else self.tree.tokens[node]


class ChildSampler:
    """Finds the children of tree nodes from the logits of a head with output tokens `ids`."""

    def __init__(self, ids: Tensor, temperature: DraftTemperature) -> None:
        self.ids, self.temperature = ids.contiguous(), temperature

    def expand(self, growing: list[TreeInProgress], logits: Tensor, rows: list[list[int]]) -> None:
        """Expand each tree by one level.

        `rows` gives the row of the logits [rows, outputs] for each node of each frontier. Children of a row that
        several nodes share are computed once.
        """
        owners = {row: each for each, own in zip(growing, rows, strict=True) for row in own}
        by_topk = [row for row, each in owners.items() if not needs_draft_probs(each.seq)]
        some = logits if by_topk == list(range(len(logits))) else logits[by_topk]
        known = dict(zip(by_topk, self._topk(some, [owners[row] for row in by_topk]), strict=True))
        by_sampling = [row for row in owners if row not in known]
        distributions = self._distributions(logits[by_sampling], [owners[row] for row in by_sampling])
        probs = dict(zip(by_sampling, distributions, strict=True))
        for each, own in zip(growing, rows, strict=True):
            pairs = zip(each.tree.frontier, own, strict=True)
            each.tree.expand(
                [known[row] if row in known else self._sample(each, node, probs[row]) for node, row in pairs]
            )

    def _topk(self, logits: Tensor, growing: list[TreeInProgress]) -> list[Children]:
        """Return the tokens that the target most likely generates, for logits [trees, outputs]."""
        if not growing:
            return []
        count = min(MAX_WIDTH, logits.shape[-1])
        if (native := native_sampler_for(logits)) is not None:
            # One native call: torch needs a dozen for a few rows, and its thread pool disturbs the native one.
            found = native.race_topk(logits, self.ids, self._sampling_rows(logits, growing), count)
            return [Children(*each) for each in zip(*found, strict=True)]
        if any(each.shares_noise for each in growing):
            confidence, columns = self._winning_probability(logits, growing).topk(count)
        else:
            best, columns = logits.topk(count)
            confidence = (best - logits.logsumexp(-1, keepdim=True)).exp()
        return [Children(*each) for each in zip(self.ids[columns].tolist(), confidence.tolist(), strict=True)]

    def _sampling_rows(self, logits: Tensor, growing: list[TreeInProgress]) -> bytes:
        """Pack sampling parameters and noise keys for the native library."""
        params = draft_params(logits, [each.seq.request.params for each in growing], self.temperature)
        return pack_sampling_rows(params, [noise.key(each.seq.request.seed, each.position) for each in growing])

    def _winning_probability(self, logits: Tensor, growing: list[TreeInProgress]) -> Tensor:
        """Return p / noise, normalized: how close each token is to winning the exponential race of its position.

        A target with the head's distribution takes the first; the closer the second, the more likely a slightly
        different target takes that one. Rows without shared noise get plain probabilities.
        """
        shares_noise = torch.tensor([[each.shares_noise] for each in growing], device=logits.device)
        seeds = torch.tensor([each.seq.request.seed for each in growing], device=logits.device)
        positions = torch.tensor([each.position for each in growing], device=logits.device)
        race = self._distributions(logits, growing) / noise.exponential(seeds, positions, noise.TOKEN_STREAM, self.ids)
        return torch.where(shares_noise, race / race.sum(-1, keepdim=True), logits.softmax(-1))

    def _distributions(self, logits: Tensor, growing: list[TreeInProgress]) -> Tensor:
        """Return the distributions to sample from, by the parameters of each request."""
        if not growing:
            return logits
        return draft_probabilities(logits, [each.seq.request.params for each in growing], self.temperature)

    def _sample(self, growing: TreeInProgress, node: int, probs: Tensor) -> Children:
        """Sample the children of a node without replacement: the first finishers of an exponential race."""
        request = growing.seq.request
        seed = torch.tensor([request.seed], device=probs.device)
        root = torch.tensor([len(growing.seq.tokens)], device=probs.device)
        race = probs / noise.draft_noise(seed, root, node + 1, self.ids)[0]
        count = min(growing.tree.num_children(node), int((probs > 0).sum()))
        order = race.topk(count).indices
        rows = probs.repeat(count, 1)
        for later in range(1, count):  # a sampled token is excluded from the distributions of later siblings
            rows[later:, order[later - 1]] = 0
        rows /= rows.sum(-1, keepdim=True)
        confidence: list[float] = rows[torch.arange(count, device=rows.device), order].tolist()
        return Children(self.ids[order].tolist(), confidence, rows)


def noise_keys(seq: Sequence, depth: int) -> list[int]:
    """Return the noise key of each depth of a draft."""
    seed, root = seq.request.seed, len(seq.tokens)
    if needs_draft_probs(seq):
        return [noise.key(seed, root, noise.DRAFT_STREAM + offset) for offset in range(depth)]
    return [noise.key(seed, root + offset) for offset in range(depth)]


def pack_draft_sampling(seqs: list[Sequence], depth: int) -> bytes | None:
    """Pack sampling parameters and noise keys by depth and sequence for the native library; None: all greedy."""
    params = [seq.request.params for seq in seqs]
    if not any(each.temperature for each in params):
        return None
    keys = zip(*(noise_keys(seq, depth) for seq in seqs), strict=True)  # by depth
    return pack_sampling_rows(params * depth, chain.from_iterable(keys))
