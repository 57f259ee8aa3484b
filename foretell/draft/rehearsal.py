"""Drafts for texts that nobody wrote, so that the first that count wait for nothing: kernels are compiled by them, and
what comes again is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.runner.made_up import MadeUp
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Outcome, Sequence, Share

from .base import Drafter

TEXT = 300  # tokens of a text: most that are written are in the first size that steps and drafts are made for


@dataclass(frozen=True)
class Guessing:
    """A draft, and how many places a head reads before it; sizes hang on both, and on how long the text is."""

    budget: Budget
    read: int = 1
    cached: int = TEXT
    temperature: float = 0.0
    texts: int = 1


# How deep drafts are that are recorded: others are filled up to these. What a head reads of a prompt, and behind it as
# many places as a draft left and one more, fills up to powers of two, which go along, so that no pair comes twice.
READS_BY_DEPTH = {1: 256, 2: 1, 3: 2, 4: 4, 5: 8, 6: 16, 8: 32, 12: 64, 16: 128}
# The same of a draft model, each level of which is a step of it: what is run in vain costs more than a recording.
OF_MODELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SERVING = (2, 4, 8, 16)  # depths that serve for all others: none is filled up to more than twice its own


def chains(longest: int) -> list[Guessing]:
    """Of up to so many tokens."""
    return [Guessing(Budget(depth), read) for depth, read in READS_BY_DEPTH.items() if depth < longest] + (
        [Guessing(Budget(longest), READS_BY_DEPTH.get(longest, 1))] if longest else []
    )


def model_chains(longest: int) -> list[Guessing]:
    """The same of a draft model."""
    depths = [depth for depth in OF_MODELS if depth < longest] + ([longest] if longest else [])
    return [Guessing(Budget(depth)) for depth in depths]


def trees(most: int, longest: int) -> list[Guessing]:
    """Of so many nodes, and branches of up to so many: how wide a tree is makes no other size where texts are few."""
    return [Guessing(Budget(most, levels=each.budget.depth)) for each in chains(longest) if each.budget.depth < most]


def rehearse_guess(drafter: Drafter, made_up: MadeUp, guessing: Guessing, times: int = 1) -> int:
    """Let a drafter guess so, `times` over; how often it did. It keeps nothing of the texts."""
    done, nodes = 0, guessing.budget.nodes
    cached = max(1, min(guessing.cached, made_up.runner.context - 1 - nodes))
    with made_up.texts(guessing.texts, cached, room=nodes, temperature=guessing.temperature) as seqs:
        try:
            for _ in range(times if seqs else 0):
                if drafter.taps:
                    drafter.follow([_run(seq, min(guessing.read, cached), made_up.runner) for seq in seqs])
                drafter.propose(seqs, [guessing.budget] * len(seqs))
                done += 1
        finally:
            for seq in seqs:
                drafter.forget(seq)
    return done


def _run(seq: Sequence, places: int, runner: ModelRunner) -> Outcome:
    """A step that brought the last places of a text, as the target would tell of it."""
    width = len(runner.taps) * runner.model.config.width
    states = torch.zeros(places, width, dtype=runner.model.dtype, device=runner.device)
    return Outcome(Share(seq, places, start=seq.cached - places, length=seq.cached), features=states)
