"""Several drafters behind one: each sequence is guessed by the one its budget names."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.types import Budget, Draft, Outcome, Sequence

from .base import Drafter


class MixDrafter(Drafter):
    """Keeps its arms in step, runs the one that is named, and shows what the free ones would guess."""

    name = "mix"

    def __init__(self, arms: list[Drafter], defaults: tuple[str, ...] | None = None) -> None:
        """`defaults` are the arms of a request that names none."""
        self._arms = {arm.name: arm for arm in arms}
        assert len(self._arms) == len(arms), "each arm has a name of its own"
        self._free = {name: arm for name, arm in self._arms.items() if arm.free}
        self._shown: dict[int, tuple[int, int, Mapping[str, Draft]]] = {}  # by sequence: its length, nodes, the guesses
        self._defaults = tuple(self._arms) if defaults is None else defaults
        if len(self._defaults) == 1:
            self.name = self._defaults[0]
        self.taps = tuple(tap for arm in arms for tap in arm.taps)
        self.wants_top = max((arm.wants_top for arm in arms), default=0)
        self.draws = any(arm.draws for arm in arms)
        self.gives_probability = any(arm.gives_probability for arm in arms)

    @property
    def arms(self) -> Mapping[str, Drafter]:
        return self._arms

    @property
    def defaults(self) -> tuple[str, ...]:
        return self._defaults

    def offers(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        budgets = [Budget(nodes)] * len(seqs)
        by_arm = {name: arm.propose(seqs, budgets) for name, arm in self._free.items()}
        found = [{name: drafts[i] for name, drafts in by_arm.items() if len(drafts[i])} for i in range(len(seqs))]
        for seq, drafts in zip(seqs, found, strict=True):
            self._shown[seq.id] = (len(seq.tokens), nodes, drafts)
        return list(found)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = [self._known(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        for name in dict.fromkeys(budget.drafter for budget in budgets):
            asked = [i for i, draft in enumerate(drafts) if draft is None and budgets[i].drafter == name]
            if asked:
                guessed = self._arms[name].propose([seqs[i] for i in asked], [budgets[i] for i in asked])
                for i, draft in zip(asked, guessed, strict=True):
                    drafts[i] = draft
        return [draft or Draft() for draft in drafts]

    def _known(self, seq: Sequence, budget: Budget) -> Draft | None:
        """What was guessed for the same text already; a draft's beginning is the guess for a smaller budget."""
        if not budget.nodes:
            return Draft()
        length, nodes, drafts = self._shown.get(seq.id, (-1, 0, {}))
        if length != len(seq.tokens) or nodes < budget.nodes or budget.drafter not in self._free:
            return None
        return drafts.get(budget.drafter, Draft()).cut(budget.nodes)

    def observe(self, outcomes: list[Outcome]) -> None:
        for arm in self._arms.values():
            arm.observe(outcomes)

    def forget(self, seq: Sequence) -> None:
        self._shown.pop(seq.id, None)
        for arm in self._arms.values():
            arm.forget(seq)

    @property
    def memory(self) -> int:
        return sum(arm.memory for arm in self._arms.values())
