"""A step's rows, share by share: what came out of the model for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

from foretell.runner.executor import StepOutput
from foretell.sampling.top import top
from foretell.types import Draft, Outcome, Share

from .judge import Judgement

Pair = tuple[Share, Draft]
Top = tuple[tuple[int, ...], ...]


def likeliest(
    pairs: list[Pair], logits: torch.Tensor, ends: list[int], count: int, wants: Callable[[Share, Draft], bool]
) -> Iterable[Top]:
    """The `count` likeliest tokens of each row, for the shares that want them; others pay nothing. A share's rows end
    at its place in `ends`."""
    if not count:
        return [()] * len(pairs)
    mine = [0] * len(pairs)  # how many of each share's rows are looked at, the last ones
    for i, (share, draft) in enumerate(pairs):
        if share.reaches_end and wants(share, draft):
            mine[i] = 1 + len(draft)
    total = sum(mine)
    if not total:
        return [()] * len(pairs)
    if total == logits.shape[0]:
        together = logits  # to cut a part out takes torch as long as to look at it
    else:
        parts = [logits[end - rows : end] for rows, end in zip(mine, ends, strict=True) if rows]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
    found = map(tuple, top(together, count))
    return [tuple(itertools.islice(found, rows)) for rows in mine]


def split_features(output: StepOutput, pairs: list[Pair]) -> Iterable[torch.Tensor | None]:
    """The target's states of each share's tokens, where they are tapped."""
    if output.features is None:
        return [None] * len(pairs)
    if len(pairs) == 1:
        return [output.features]
    return torch.split(output.features, [share.take + len(draft) for share, draft in pairs])


def outcome_of(
    share: Share, draft: Draft, judged: Judgement | None, features: torch.Tensor | None, top: Top
) -> Outcome:
    """What a step taught about one sequence; nothing was judged where the prompt goes on."""
    if judged is None:
        return Outcome(share, draft, features=features)
    return Outcome(share, draft, judged.verdict, judged.chosen, (), judged.logprobs, features, top, judged.details)
