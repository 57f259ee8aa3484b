"""Drafts for texts that nobody wrote, so that the first that count wait for nothing: kernels are compiled by them, and
what comes again is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.runner.made_up import MadeUp
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Outcome, Sequence, Share

from .base import Drafter

TEXT, SHORT = 300, 100  # tokens of a text: most that are written are in the second or the first size heads are made for


@dataclass(frozen=True)
class Guessing:
    """A draft, and how many places a head reads before it; sizes hang on both, and on how long the text is."""

    budget: Budget
    read: int = 1
    cached: int = TEXT
    temperature: float = 0.0


# What a head reads of a prompt, and behind it as many places as a draft left and one more; all numbers fill up to
# powers of two. How deep a chain is and how much is read are recorded apart, so that no pair comes twice.
CHAINS = tuple(Guessing(Budget(depth), read) for depth, read in ((1, 256), (2, 1), (3, 2), (4, 4), (5, 8)))
TREES = tuple(Guessing(Budget(nodes, levels=levels)) for nodes, levels in ((16, 2), (32, 4), (64, 5)))
DEEPER = tuple(Guessing(Budget(depth), 16) for depth in (6, 7, 8))


def rehearse_guess(drafter: Drafter, made_up: MadeUp, guessing: Guessing, times: int = 1) -> int:
    """Let a drafter guess so, `times` over; how often it did. It keeps nothing of the text."""
    done, nodes = 0, guessing.budget.nodes
    cached = min(guessing.cached, made_up.runner.context // 2)
    with made_up.texts(1, cached, room=nodes, temperature=guessing.temperature) as seqs:
        for seq in seqs:
            try:
                for _ in range(times):
                    if drafter.taps:
                        drafter.follow([_run(seq, min(guessing.read, cached), made_up.runner)])
                    drafter.propose([seq], [guessing.budget])
                    done += 1
            finally:
                drafter.forget(seq)
    return done


def _run(seq: Sequence, places: int, runner: ModelRunner) -> Outcome:
    """A step that brought the last places of a text, as the target would tell of it."""
    width = len(runner.taps) * runner.model.config.width
    states = torch.zeros(places, width, dtype=runner.model.dtype, device=runner.device)
    return Outcome(Share(seq, places, start=seq.cached - places, length=seq.cached), features=states)
