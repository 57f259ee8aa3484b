"""Stands before the drafter: one that fails, or guesses what cannot be, costs its guesses and not the texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from foretell.draft.base import Drafter
from foretell.types import NO_DRAFT, Budget, Draft, Outcome, Sequence, Share, Unseen

from .admit import admitted

LOG = logging.getLogger("foretell")

Answer = TypeVar("Answer")


class Guard:
    """Asks the drafter, and goes on without an answer where there is none."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab = drafter, vocab
        self.top_arms = frozenset(name for name, arm in drafter.arms.items() if arm.wants_top)
        self.copiers = frozenset(name for name, arm in drafter.arms.items() if arm.free) - self.top_arms
        self._failures = 0  # of the drafter as a whole

    @property
    def failures(self) -> int:
        """Of the drafter and of its parts."""
        return self._failures + self.drafter.failures

    def offers(self, seqs: list[Sequence], nodes: int) -> dict[int, Mapping[str, Draft]]:
        """By sequence what would be guessed for next to nothing."""
        if not seqs:
            return {}
        nothing: list[Mapping[str, Draft]] = [{}] * len(seqs)
        found = self._guarded("offers", lambda: self.drafter.offers(seqs, nodes), nothing)
        return {seq.id: offer for seq, offer in zip(seqs, found, strict=False)}

    def propose(self, plan: list[Share], budgets: list[Budget]) -> list[Draft]:
        """A draft for each share, of those that can be checked; nobody is asked where nobody may draft."""
        nothing = [NO_DRAFT] * len(plan)
        if not any(budget.nodes for budget in budgets):
            return nothing
        return self._guarded("propose", lambda: self._propose(plan, budgets), nothing)

    def seen(self, drafts: list[Draft]) -> list[Draft]:
        """With the tokens that were left on a device; where they cannot be had, with such as never stand."""
        return [draft if draft.unseen is None else self._seen(draft, draft.unseen) for draft in drafts]

    def _seen(self, draft: Draft, unseen: Unseen) -> Draft:
        nodes, nothing = len(draft), (list[int](), list[float]())
        tokens, sure = self._guarded("seen", unseen.seen, nothing)
        if len(tokens) < nodes:
            return replace(draft, unseen=None)
        return replace(draft, tokens=tuple(tokens[:nodes]), confidence=tuple(sure[:nodes]), unseen=None)

    def _propose(self, plan: list[Share], budgets: list[Budget]) -> list[Draft]:
        drafts = self.drafter.propose([share.seq for share in plan], budgets)
        return [admitted(draft, share.budget, self.vocab) for share, draft in zip(plan, drafts, strict=True)]

    def prepare(self, seqs: list[Sequence]) -> None:
        """There is time for what has to be done before anything is guessed for them."""
        self._guarded("prepare", lambda: self.drafter.prepare(seqs), None)

    def follow(self, outcomes: list[Outcome]) -> None:
        """Who keeps states beside the target's has to keep them of every text: its pages may become another's."""
        if self.drafter.taps:
            self._guarded("follow", lambda: self.drafter.follow(outcomes), None)

    def observe(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._guarded("observe", lambda: self.drafter.observe(outcomes), None)

    def forget(self, seq: Sequence) -> None:
        if seq.request.drafters or self.drafter.taps:  # else no drafter has met it
            self._guarded("forget", lambda: self.drafter.forget(seq), None)

    def _guarded(self, where: str, do: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return do()
        except Exception:
            self._failures += 1
            LOG.exception("the drafter %s failed in %s; its guesses are left out", self.drafter.name, where)
            return otherwise
