"""Several drafters behind one: each sequence is guessed by the one its budget names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TypeVar

from foretell.types import NO_DRAFT, Budget, Draft, Sequence, StepResult

from .backoff import Supervisor
from .base import Drafter, may_be_shown
from .tree_merge import MergedDrafter
from .validate import valid_drafts

SURE = 0.8  # of its first guess: who is so sure is seldom outdone

Answer = TypeVar("Answer")


class MixDrafter(Drafter):
    """Keeps its arms in step, runs the one that is named, and shows what the free ones would guess.

    A drafter that fails costs its own draft tokens and no others; `Supervisor` has its back-off. An arm `a+b` is two
    others, whose draft tokens form one tree.
    """

    name = "mix"

    supervises = True
    supervisor: Supervisor

    def __init__(
        self, arms: list[Drafter], defaults: tuple[str, ...] | None = None, supervisor: Supervisor | None = None
    ) -> None:
        """`defaults` are the arms of a request that names none."""
        self._arms = {arm.name: arm for arm in arms}
        free = [(arm.name, arm.stands_back) for arm in arms if arm.free]
        self._free = sorted(free, key=itemgetter(1))
        self._followers = [arm.name for arm in arms if arm.hidden_layers]
        self._readers = [arm.name for arm in arms if type(arm).prepare is not Drafter.prepare]
        self._learners = [arm.name for arm in arms if type(arm).observe is not Drafter.observe]
        assert len(self._arms) == len(arms), "each arm has a name of its own"
        self._mergers = {arm.name: arm for arm in arms if isinstance(arm, MergedDrafter)}
        self._leavers = [arm for arm in arms if type(arm).is_ready is not Drafter.is_ready]
        self._shown: dict[int, tuple[int, int, Mapping[str, Draft]]] = {}  # by sequence: its length, nodes, the guesses
        self.supervisor = supervisor or Supervisor()
        self._defaults = tuple(self._arms) if defaults is None else defaults
        if len(self._defaults) == 1:
            self.name = self._defaults[0]
        self.hidden_layers = tuple(sorted({tap for arm in arms for tap in arm.hidden_layers}))
        self.top_k = max((arm.top_k for arm in arms), default=0)
        self.draws = any(arm.draws for arm in arms)
        self.gives_probability = any(arm.gives_probability for arm in arms)

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        return self._arms

    @property
    def unavailable(self) -> frozenset[str]:
        """Asked for in every step; most drafters never leave, and few fail."""
        resting = frozenset(arm.name for arm in self._leavers if not arm.is_ready) if self._leavers else frozenset()
        return resting | self.supervisor.disabled

    @property
    def default_drafters(self) -> tuple[str, ...]:
        return self._defaults

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        found: list[dict[str, Draft]] = [{} for _ in seqs]
        sure, budget = [False] * len(seqs), Budget(nodes)
        for name, last in self._free:
            asked = [i for i, seq in enumerate(seqs) if name in seq.request.drafters and not (last and sure[i])]
            if not asked:
                continue
            guessed = self._guesses(name, [seqs[i] for i in asked], [budget] * len(asked))
            for i, draft in zip(asked, guessed, strict=True):
                if may_be_shown(draft):
                    found[i][name] = draft
                    sure[i] |= draft.confidence is not None and draft.confidence[0] >= SURE
        for seq, drafts in zip(seqs, found, strict=True):
            self._shown[seq.id] = (len(seq.tokens), nodes, drafts)
        return list(found)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts: list[Draft] = []
        missing: dict[str, list[int]] = {}  # by arm
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            known = self._known(seq, budget)
            drafts.append(known or NO_DRAFT)
            if known is None:
                missing.setdefault(budget.drafter, []).append(i)
        for name, asked in missing.items():
            guessed = self._guesses(name, [seqs[i] for i in asked], [budgets[i] for i in asked])
            for i, draft in zip(asked, guessed, strict=True):
                drafts[i] = draft
        return drafts

    def _known(self, seq: Sequence, budget: Budget) -> Draft | None:
        """What was guessed for the same text already; a draft's beginning is the guess for a smaller budget."""
        if not budget.nodes:
            return NO_DRAFT
        length, nodes, drafts = self._shown.get(seq.id, (-1, 0, {}))
        if length != len(seq.tokens) or nodes < budget.nodes:
            return None
        draft = drafts.get(budget.drafter)
        return None if draft is None else draft.truncate(budget.nodes)

    def _guesses(self, name: str, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        if (merged := self._mergers.get(name)) is not None:
            return self._merged(merged, seqs, budgets)
        nothing = [NO_DRAFT] * len(seqs)
        return self._guarded(
            name, "propose", lambda arm: valid_drafts(arm.propose(seqs, budgets), len(seqs), name), nothing
        )

    def _merged(self, arm: MergedDrafter, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """What its parts guess; one that fails leaves it to the others."""
        if arm.name in self.supervisor.disabled:
            return [NO_DRAFT] * len(seqs)
        pairs = list(zip(seqs, budgets, strict=True))
        found = [self._guesses(part, seqs, [arm.budget(part, *pair) for pair in pairs]) for part in arm.parts]

        def merge() -> list[Draft]:
            return [arm.merge(*pair, drafts) for pair, drafts in zip(pairs, zip(*found, strict=True), strict=True)]

        return self.supervisor.call(arm.name, "merge", merge, [NO_DRAFT] * len(seqs))

    def prepare(self, seqs: list[Sequence]) -> None:
        for name in self._readers:
            self._prepare(name, [seq for seq in seqs if name in seq.request.drafters])

    def _prepare(self, name: str, seqs: list[Sequence]) -> None:
        if seqs:
            self._guarded(name, "prepare", lambda arm: arm.prepare(seqs), None)

    def update_kv(self, outcomes: list[StepResult]) -> None:
        for name in self._followers:
            self._guarded(name, "update_kv", lambda arm: arm.update_kv(outcomes), None, always=True)

    def observe(self, outcomes: list[StepResult]) -> None:
        for name in self._learners:
            self._guarded(name, "observe", lambda arm: arm.observe(outcomes), None)

    def forget(self, seq: Sequence) -> None:
        self._shown.pop(seq.id, None)
        for name in self._arms:
            self._guarded(name, "forget", lambda arm: arm.forget(seq), None, always=True)  # a paused one keeps nothing

    def _guarded(
        self, name: str, method: str, do: Callable[[Drafter], Answer], otherwise: Answer, always: bool = False
    ) -> Answer:
        return self.supervisor.call(name, method, lambda: do(self._arms[name]), otherwise, always)

    @property
    def memory(self) -> int:
        return sum(arm.memory for arm in self._arms.values())
