"""How a drafter draws: as the request asked, with the noise its rule calls for, and q kept as it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from foretell.params import SamplingParams
from foretell.sampling import noise
from foretell.sampling.sampling import probabilities
from foretell.types import Sequence

DraftTemperature = Literal["fixed", "entropy"]
SHARPEST, PULL = 0.8, 1.0  # entropy: the temperature is multiplied with SHARPEST ** (PULL / entropy)


@dataclass(frozen=True)
class Drawn:
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
) -> Drawn:
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
    return Drawn(tokens, probs, sure[torch.arange(len(seqs), device=best.device), best].tolist())


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
