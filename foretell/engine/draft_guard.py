"""Calls the drafter: one that fails, or returns what cannot be verified, costs its drafts and no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from foretell.draft.backoff import Supervisor, comes_from_signal
from foretell.draft.base import Drafter
from foretell.draft.isolated import is_ours
from foretell.draft.validate import valid_draft, valid_offers, valid_probs
from foretell.sampling.grammar_matcher import GrammarMatcher
from foretell.types import NO_DRAFT, Budget, DeviceDraft, Draft, ScheduledSequence, Sequence, StepResult


def admitted(draft: object, budget: Budget, vocab: int, trusted: bool = False) -> Draft:
    """Return a draft cut to its budget, under its drafter's name; raise if the target cannot verify it.

    The probabilities of a `trusted` drafter are taken to be distributions.
    """
    if draft is NO_DRAFT or budget.nodes <= 0:
        return NO_DRAFT
    name = budget.drafter or getattr(draft, "source", "") or "a drafter without a name"
    draft = valid_draft(draft, name).truncate(budget.nodes)
    if draft.device_draft is not None and not budget.on_device:
        raise ValueError(f"{name} left its draft tokens on a device, which this step does not allow")
    if budget.is_tree:
        deepest, depths = budget.depth, draft.depths()
        if max(depths, default=0) > deepest:
            draft = draft.subset([node for node, depth in enumerate(depths) if depth <= deepest])
    if not len(draft):
        return NO_DRAFT
    draft = distinct(draft)
    if budget.drafter and draft.source != budget.drafter:
        draft = replace(draft, source=budget.drafter)
    if draft.device_draft is not None:  # the device looks the tokens up and has no others
        return draft
    if min(draft.tokens) < 0 or max(draft.tokens) >= vocab:
        raise ValueError(f"{name} returned a token outside 0..{vocab - 1}")
    return valid_probs(draft, vocab, name, trusted)


def distinct(draft: Draft) -> Draft:
    """One row per token under one parent: what hangs below a guess that was made before hangs below that one.

    A guess drawn at random keeps its row: it is a try of its own, judged by what it was drawn from.
    """
    if draft.is_chain or len({*zip(draft.parents, draft.tokens, strict=True)}) == len(draft):
        return draft
    first: dict[tuple[int, int], int] = {}
    own = list(range(len(draft)))  # whose row each node has
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        key = (own[parent] if parent >= 0 else parent, token)
        if not draft.is_sampled(node):
            own[node] = first.get(key, node)
        first.setdefault(key, node)
    parents = tuple(own[parent] if parent >= 0 else parent for parent in draft.parents)
    return replace(draft, parents=parents).subset([node for node, row in enumerate(own) if row == node])


Answer = TypeVar("Answer")


class SafeDrafter:
    """Asks the drafter, and goes on without an answer where there is none."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab = drafter, vocab
        self.learning_drafters = frozenset(name for name, arm in drafter.drafters.items() if arm.top_k)
        self.copying_drafters = (
            frozenset(name for name, arm in drafter.drafters.items() if arm.free) - self.learning_drafters
        )
        self._trusted = all(map(is_ours, drafter.drafters.values()))
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
        return {name: (failures[name], name in disabled) for name in (*self.drafter.drafters, *failures)}

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> dict[int, Mapping[str, Draft]]:
        """By sequence what would be guessed for next to nothing."""
        if not seqs:
            return {}
        nothing: list[Mapping[str, Draft]] = [{}] * len(seqs)
        found = self._guarded("free_drafts", lambda: self._offers(seqs, nodes), nothing)
        return {seq.id: offer for seq, offer in zip(seqs, found, strict=True)}

    def _offers(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        found = self.drafter.free_drafts(seqs, nodes)
        return found if self._is_mix else valid_offers(found, len(seqs), self._name)

    def propose(self, plan: list[ScheduledSequence], budgets: list[Budget]) -> list[Draft]:
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

    def fetch_device_drafts(self, drafts: list[Draft]) -> list[Draft]:
        """With the tokens that were left on a device; where they cannot be had, with such as never stand."""
        return [draft if draft.device_draft is None else self._seen(draft, draft.device_draft) for draft in drafts]

    def _seen(self, draft: Draft, unseen: DeviceDraft) -> Draft:
        nodes, nothing = len(draft), (list[int](), list[float]())
        name = draft.source if self._is_mix else self._name
        tokens, sure = self.supervisor.call(name, "wait", unseen.wait, nothing, always=True)
        if len(tokens) < nodes:
            return replace(draft, device_draft=None)
        return replace(draft, tokens=tuple(tokens[:nodes]), confidence=tuple(sure[:nodes]), device_draft=None)

    def prepare(self, seqs: list[Sequence]) -> None:
        """There is time for what has to be done before anything is guessed for them."""
        self._guarded("prepare", lambda: self.drafter.prepare(seqs), None)

    def update_kv(self, outcomes: list[StepResult]) -> None:
        """Who keeps states beside the target's has to keep them of every text: its pages may become another's."""
        if self.drafter.hidden_layers:
            self._guarded("update_kv", lambda: self.drafter.update_kv(outcomes), None, always=True)

    def observe(self, outcomes: list[StepResult]) -> None:
        if outcomes:
            self._guarded("observe", lambda: self.drafter.observe(outcomes), None)

    def forget(self, seq: Sequence) -> None:
        if seq.request.drafters or self.drafter.hidden_layers:  # else no drafter has met it
            self._guarded("forget", lambda: self.drafter.forget(seq), None, always=True)

    def _guarded(self, method: str, do: Callable[[], Answer], otherwise: Answer, always: bool = False) -> Answer:
        return self.supervisor.call(self._name, method, do, otherwise, always)


GRAMMAR = "grammar"  # the source of guesses that a grammar forces


def constrain(draft: Draft, matcher: GrammarMatcher, budget: Budget) -> Draft:
    """Tokens the grammar forces, where it does; else the draft without what hangs below a forbidden node.

    A forbidden node that was drawn at random stays, to be rejected with its residual: dropping it would be a bias.
    """
    if budget.nodes and (forced := matcher.forced_tokens(budget.nodes)):
        return replace(Draft.chain(forced, GRAMMAR), confidence=(1.0,) * len(forced))
    if not draft.is_chain:
        return draft  # the masks forbid what must be forbidden
    legal = matcher.count_allowed(draft.tokens)
    return draft.truncate(legal + 1 if legal < len(draft) and draft.is_sampled(legal) else legal)
