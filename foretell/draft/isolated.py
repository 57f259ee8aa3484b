"""Gives a drafter of another package copies of sequences, so that it cannot change the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foretell.types import Budget, Draft, Sequence, StepResult

from .base import Drafter, Wrapper

TRAITS = ("unseen_on", "free", "reads", "cost_share", "prior", "stands_back")  # besides those of every wrapper


class Isolated(Wrapper):
    """A drafter whose changes to `seq.tokens` or `seq.pages` are lost."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        for trait in TRAITS:
            setattr(self, trait, getattr(inner, trait))

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return self.inner.propose(_copies(seqs), list(budgets))

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        return self.inner.free_drafts(_copies(seqs), nodes)

    def prepare(self, seqs: list[Sequence]) -> None:
        self.inner.prepare(_copies(seqs))

    def update_kv(self, outcomes: list[StepResult]) -> None:
        self.inner.update_kv([_with_copy(outcome) for outcome in outcomes])

    def observe(self, outcomes: list[StepResult]) -> None:
        self.inner.observe([_with_copy(outcome) for outcome in outcomes])

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(_copy(seq))

    @property
    def is_ready(self) -> bool:
        return self.inner.is_ready

    def wake(self) -> None:
        self.inner.wake()

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        return {self.name: self}


def is_ours(drafter: Drafter) -> bool:
    """Return whether a drafter's class, and that of any drafter it wraps, is of this package."""
    own = type(drafter).__module__.partition(".")[0] == "foretell"
    return own and (not isinstance(drafter, Wrapper) or is_ours(drafter.inner))


def isolated(drafter: Drafter) -> Drafter:
    """Isolate a drafter of another package; one of ours, and one that has others below it, stays as it is."""
    is_single = list(drafter.drafters.values()) == [drafter]
    return Isolated(drafter) if is_single and not is_ours(drafter) else drafter


def _copy(seq: Sequence) -> Sequence:
    return replace(seq, tokens=list(seq.tokens), pages=list(seq.pages))


def _copies(seqs: list[Sequence]) -> list[Sequence]:
    return [_copy(seq) for seq in seqs]


def _with_copy(outcome: StepResult) -> StepResult:
    return replace(outcome, scheduled=replace(outcome.scheduled, seq=_copy(outcome.scheduled.seq)))
