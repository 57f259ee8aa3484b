"""How a head's guesses are drawn where its logits are; `drawing.draw_nodes` is the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from foretell.draft.heads.tree import MOST_WIDE, ROOT, Children, Tree
from foretell.sampling import noise
from foretell.sampling.native_sampler import native_sampler_for, pack_sampling_rows
from foretell.sampling.sampling import probabilities
from foretell.sampling_params import SamplingParams
from foretell.types import Sequence

DraftTemperature = Literal["fixed", "entropy"]
SHARPEST, PULL = 0.8, 1.0  # entropy: the temperature is multiplied with SHARPEST ** (PULL / entropy)


@dataclass(frozen=True)
class SampledToken:
    """One guess for each sequence."""

    tokens: list[int]
    probs: Tensor  # [sequences, vocab], or as many as there are `ids`: what each was drawn from
    confidence: list[float]  # the probability each was drawn with


def draw_nodes(
    logits: Tensor,
    seqs: list[Sequence],
    offset: int,
    temperature: DraftTemperature = "fixed",
    ids: Tensor | None = None,
) -> SampledToken:
    """Node `offset` of a chain for each sequence, from the draft's logits [sequences, vocab].

    `ids` are the tokens the logits are of, where they are not of all. Under `match` draft and target share their noise,
    keyed by position; the other rules need noise of the step's own.
    """
    probs = draft_probabilities(logits, [seq.request.params for seq in seqs], temperature)
    lanes = torch.arange(probs.shape[-1], device=probs.device) if ids is None else ids
    best = (probs / _noise(seqs, offset, probs, lanes)).argmax(-1)
    tokens: list[int] = lanes[best].tolist()
    # Of a greedy draft the row says 1 for its token; how sure the draft was is in what lies behind it.
    greedy = torch.tensor([[seq.request.params.temperature == 0] for seq in seqs], device=probs.device)
    sure = torch.where(greedy, logits.softmax(-1), probs) if greedy.any() else probs
    return SampledToken(tokens, probs, sure[torch.arange(len(seqs), device=best.device), best].tolist())


def draft_probabilities(logits: Tensor, params: list[SamplingParams], temperature: DraftTemperature) -> Tensor:
    """What is drawn from, row by row of logits [rows, tokens]."""
    return probabilities(logits, draft_params(logits, params, temperature))


def draft_params(logits: Tensor, params: list[SamplingParams], temperature: DraftTemperature) -> list[SamplingParams]:
    """How that is drawn from."""
    if temperature == "fixed":
        return params
    return [_sharpened(row, each) for row, each in zip(logits, params, strict=True)]


def _noise(seqs: list[Sequence], offset: int, like: Tensor, lanes: Tensor) -> Tensor:
    """[sequences, lanes] exponentials."""
    race = torch.empty_like(like)
    for shared in (True, False):
        rows = [i for i, seq in enumerate(seqs) if (seq.request.rule == "match") == shared]
        if rows:
            seeds = torch.tensor([seqs[i].request.seed for i in rows], device=like.device)
            roots = torch.tensor([len(seqs[i].tokens) for i in rows], device=like.device)
            race[rows] = (
                noise.exponential(seeds, roots + offset, noise.TOKEN_STREAM, lanes)
                if shared
                else noise.draft_noise(seeds, roots, offset, lanes)
            )
    return race


def _sharpened(logits: Tensor, params: SamplingParams) -> SamplingParams:
    """Draw closer to the likeliest where the draft is sure; q is the sharpened distribution, so nothing is lost."""
    if params.temperature == 0:
        return params
    probs = probabilities(logits[None], [SamplingParams(temperature=params.temperature)])
    entropy = float(-(probs * probs.clamp_min(1e-12).log()).sum())
    factor = SHARPEST ** (PULL / max(entropy, 1e-2))
    return replace(params, temperature=max(params.temperature * factor, 1e-3))


@dataclass(frozen=True)
class TreeInProgress:
    """A text and the tree that grows behind it."""

    seq: Sequence
    tree: Tree

    @property
    def races(self) -> bool:
        """Whether the target's token is what wins a race: under `match`, whose noise the draft knows."""
        return self.seq.request.params.temperature > 0 and self.seq.request.rule == "match"

    @property
    def place(self) -> int:
        """Where in the text the next level's tokens would stand."""
        return len(self.seq.tokens) + self.tree.depth

    def before(self, node: int) -> int:
        """The token of a node, or of the root."""
        return self.seq.tokens[-1] if node == ROOT else self.tree.tokens[node]


def must_draw(seq: Sequence) -> bool:
    """Whether a text's guesses are judged by what they were drawn from, and so must be drawn."""
    return seq.request.params.temperature > 0 and seq.request.rule != "match"


class ChildSampler:
    """Grows trees by what a head says, over the tokens `ids`."""

    def __init__(self, ids: Tensor, temperature: DraftTemperature) -> None:
        self.ids, self.temperature = ids.contiguous(), temperature

    def grow(self, plots: list[TreeInProgress], logits: Tensor, rows: list[list[int]]) -> None:
        """Grow each tree by a level. `rows` tell for each node of each tree's level which of the logits [rows, outputs]
        are its own; where all nodes of a level have the same ones, they are made up once."""
        owners = {row: plot for plot, mine in zip(plots, rows, strict=True) for row in mine}
        likely = [row for row, plot in owners.items() if not must_draw(plot.seq)]
        some = logits if likely == list(range(len(logits))) else logits[likely]
        known = dict(zip(likely, self._likeliest(some, [owners[row] for row in likely]), strict=True))
        drawn = [row for row in owners if row not in known]
        shares = dict(zip(drawn, self._shares(logits[drawn], [owners[row] for row in drawn]), strict=True))
        for plot, mine in zip(plots, rows, strict=True):
            pairs = zip(plot.tree.level, mine, strict=True)
            plot.tree.grow(
                [known[row] if row in known else self._drawn(plot, node, shares[row]) for node, row in pairs]
            )

    def _likeliest(self, logits: Tensor, plots: list[TreeInProgress]) -> list[Children]:
        """The tokens that are likeliest to be the target's own, of logits [plots, outputs]."""
        if not plots:
            return []
        most = min(MOST_WIDE, logits.shape[-1])
        if (native := native_sampler_for(logits)) is not None:
            # One call: torch makes a dozen for a few rows, and its threads and the library's are in each other's way.
            found = native.race_topk(logits, self.ids, self._draws(logits, plots), most)
            return [Children(*each) for each in zip(*found, strict=True)]
        if any(plot.races for plot in plots):
            shares, at = self._odds(logits, plots).topk(most)
        else:
            best, at = logits.topk(most)
            shares = (best - logits.logsumexp(-1, keepdim=True)).exp()
        return [Children(*each) for each in zip(self.ids[at].tolist(), shares.tolist(), strict=True)]

    def _draws(self, logits: Tensor, plots: list[TreeInProgress]) -> bytes:
        """The races of the plots, as the library wants them."""
        params = draft_params(logits, [plot.seq.request.params for plot in plots], self.temperature)
        return pack_sampling_rows(params, [noise.key(plot.seq.request.seed, plot.place) for plot in plots])

    def _odds(self, logits: Tensor, plots: list[TreeInProgress]) -> Tensor:
        """How far each token is ahead in its text's race, as shares: a target that sees it as the head does takes the
        first, and the closer the second is, the likelier it takes that. Without a race, how likely each is."""
        races = torch.tensor([[plot.races] for plot in plots], device=logits.device)
        seeds = torch.tensor([plot.seq.request.seed for plot in plots], device=logits.device)
        places = torch.tensor([plot.place for plot in plots], device=logits.device)
        ahead = self._shares(logits, plots) / noise.exponential(seeds, places, noise.TOKEN_STREAM, self.ids)
        return torch.where(races, ahead / ahead.sum(-1, keepdim=True), logits.softmax(-1))

    def _shares(self, logits: Tensor, plots: list[TreeInProgress]) -> Tensor:
        """What is drawn from, as each request wants it."""
        if not plots:
            return logits
        return draft_probabilities(logits, [plot.seq.request.params for plot in plots], self.temperature)

    def _drawn(self, plot: TreeInProgress, node: int, probs: Tensor) -> Children:
        """As many children as are wanted, drawn without replacement: in the order in which a race ends."""
        request = plot.seq.request
        seed = torch.tensor([request.seed], device=probs.device)
        root = torch.tensor([len(plot.seq.tokens)], device=probs.device)
        race = probs / noise.draft_noise(seed, root, node + 1, self.ids)[0]
        count = min(plot.tree.wanted(node), int((probs > 0).sum()))
        order = race.topk(count).indices
        rows = probs.repeat(count, 1)
        for later in range(1, count):  # who is out cannot be drawn again
            rows[later:, order[later - 1]] = 0
        rows /= rows.sum(-1, keepdim=True)
        shares: list[float] = rows[torch.arange(count, device=rows.device), order].tolist()
        return Children(self.ids[order].tolist(), shares, rows)


def noise_keys(seq: Sequence, depth: int) -> list[int]:
    """Of the noise that draws the token of each depth."""
    seed, root = seq.request.seed, len(seq.tokens)
    if must_draw(seq):
        return [noise.key(seed, root, noise.DRAFT_STREAM + at) for at in range(depth)]
    return [noise.key(seed, root + at) for at in range(depth)]


def draws_of(seqs: list[Sequence], depth: int) -> bytes | None:
    """As the native library wants them, a DRAW for each depth and text; None where nothing is drawn for any text."""
    params = [seq.request.params for seq in seqs]
    if not any(each.temperature for each in params):
        return None
    keys = zip(*(noise_keys(seq, depth) for seq in seqs), strict=True)  # by depth
    return pack_sampling_rows(params * depth, chain.from_iterable(keys))
