"""Calls the drafter: one that fails, or returns what cannot be verified, costs its drafts and no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from foretell.draft.backoff import Supervisor, comes_from_signal
from foretell.draft.base import Drafter
from foretell.draft.isolated import is_ours
from foretell.draft.validate import valid_offers
from foretell.types import NO_DRAFT, Budget, Draft, Outcome, Sequence, Share, Unseen

from .admit import admitted

Answer = TypeVar("Answer")


class Guard:
    """Asks the drafter, and goes on without an answer where there is none."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab = drafter, vocab
        self.top_arms = frozenset(name for name, arm in drafter.arms.items() if arm.wants_top)
        self.copiers = frozenset(name for name, arm in drafter.arms.items() if arm.free) - self.top_arms
        self._trusted = all(map(is_ours, drafter.arms.values()))
        self._is_mix = drafter.supervises
        if drafter.supervisor is None:
            drafter.supervisor = Supervisor()
        self.supervisor = drafter.supervisor
        self._name = "mix" if self._is_mix else drafter.name

    @property
    def failures(self) -> int:
        """Failed calls since the start, of all drafters."""
        return self.supervisor.failures.total()

    @property
    def health(self) -> dict[str, tuple[int, bool]]:
        """By drafter its failures since the start, and whether it is disabled now."""
        failures, disabled = self.supervisor.failures.copy(), self.supervisor.disabled
        return {name: (failures[name], name in disabled) for name in (*self.drafter.arms, *failures)}

    def offers(self, seqs: list[Sequence], nodes: int) -> dict[int, Mapping[str, Draft]]:
        """By sequence what would be guessed for next to nothing."""
        if not seqs:
            return {}
        nothing: list[Mapping[str, Draft]] = [{}] * len(seqs)
        found = self._guarded("offers", lambda: self._offers(seqs, nodes), nothing)
        return {seq.id: offer for seq, offer in zip(seqs, found, strict=True)}

    def _offers(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        found = self.drafter.offers(seqs, nodes)
        return found if self._is_mix else valid_offers(found, len(seqs), self._name)

    def propose(self, plan: list[Share], budgets: list[Budget]) -> list[Draft]:
        """A draft for each share, of those that can be checked; nobody is asked where nobody may draft."""
        nothing = [NO_DRAFT] * len(plan)
        if not any(budget.nodes for budget in budgets):
            return nothing
        seqs = [share.seq for share in plan]
        found = self._guarded("propose", lambda: self._propose(seqs, budgets), nothing)
        return [self._admit(draft, budget) for draft, budget in zip(found, budgets, strict=True)]

    def _propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        found = list(self.drafter.propose(seqs, budgets))
        if len(found) != len(seqs):
            raise ValueError(f"{self._name} returned {len(found)} drafts for {len(seqs)} sequences")
        return found

    def _admit(self, draft: Draft, budget: Budget) -> Draft:
        """Return the draft, or none where it is invalid: that costs one sequence its draft in this step."""
        name = budget.drafter if self._is_mix else self._name
        try:
            draft = admitted(draft, budget, self.vocab, self._trusted)
        except BaseException as error:
            if comes_from_signal(error):
                raise
            self.supervisor.fail(name, "draft", error)
            return NO_DRAFT
        if len(draft):
            self.supervisor.succeed(name, "draft")
        return draft

    def seen(self, drafts: list[Draft]) -> list[Draft]:
        """With the tokens that were left on a device; where they cannot be had, with such as never stand."""
        return [draft if draft.unseen is None else self._seen(draft, draft.unseen) for draft in drafts]

    def _seen(self, draft: Draft, unseen: Unseen) -> Draft:
        nodes, nothing = len(draft), (list[int](), list[float]())
        name = draft.source if self._is_mix else self._name
        tokens, sure = self.supervisor.call(name, "seen", unseen.seen, nothing, always=True)
        if len(tokens) < nodes:
            return replace(draft, unseen=None)
        return replace(draft, tokens=tuple(tokens[:nodes]), confidence=tuple(sure[:nodes]), unseen=None)

    def prepare(self, seqs: list[Sequence]) -> None:
        """There is time for what has to be done before anything is guessed for them."""
        self._guarded("prepare", lambda: self.drafter.prepare(seqs), None)

    def follow(self, outcomes: list[Outcome]) -> None:
        """Who keeps states beside the target's has to keep them of every text: its pages may become another's."""
        if self.drafter.taps:
            self._guarded("follow", lambda: self.drafter.follow(outcomes), None, always=True)

    def observe(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._guarded("observe", lambda: self.drafter.observe(outcomes), None)

    def forget(self, seq: Sequence) -> None:
        if seq.request.drafters or self.drafter.taps:  # else no drafter has met it
            self._guarded("forget", lambda: self.drafter.forget(seq), None, always=True)

    def _guarded(self, method: str, do: Callable[[], Answer], otherwise: Answer, always: bool = False) -> Answer:
        return self.supervisor.call(self._name, method, do, otherwise, always)
