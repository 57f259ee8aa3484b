"""How many nodes each sequence may draft in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from foretell.types import Budget, Draft, Outcome, Sequence, Share


class Controller(ABC):
    """Decides before the step, from the past alone, so that it never biases a sample."""

    @abstractmethod
    def budgets(self, seqs: list[Sequence]) -> list[Budget]:
        """A budget for each sequence; 0 nodes is a normal answer."""

    def trim(self, plan: list[Share], drafts: list[Draft]) -> list[Draft]:
        """Cut drafts by their confidence."""
        return drafts

    def observe(self, outcomes: list[Outcome]) -> None:  # noqa: B027 - a fixed one learns nothing
        """What came of a step."""


class FixedController(Controller):
    """As many nodes each step as it was told, less where the request or its end says so."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def budgets(self, seqs: list[Sequence]) -> list[Budget]:
        return [Budget(self._nodes(seq)) for seq in seqs]

    def _nodes(self, seq: Sequence) -> int:
        choice = seq.request.speculation
        if not choice.enabled or seq.pending != 1:  # a prompt's last step: the first token waits for no draft
            return 0
        wanted = self.nodes if choice.max_draft is None else min(self.nodes, choice.max_draft)
        return max(0, min(wanted, seq.room - 1))  # the step adds a token of its own
