"""Controller interface: how many draft tokens each sequence may have in a step, and fixed lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property

from foretell.control.decision_log import DecisionLog
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, StepResult, StepTimes

FreeDrafts = Mapping[int, Mapping[str, Draft]]  # by sequence id and drafter


class Controller(ABC):
    """Decides before each step, from past steps and free drafts alone.

    It sees no sampled token before it decides, so it cannot bias the output distribution.
    """

    allows_early_start: bool = True  # the engine may decide the next step before it is asked for one

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        """Return the sequences whose free drafts it wants to see, and the most tokens of each."""
        return [], 0

    @abstractmethod
    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        """Return a budget for each sequence; 0 nodes is a normal answer. `free_drafts` are those it asked for."""

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """Return whether the next step is unlikely to have drafts, so that it may be scheduled asynchronously."""
        return not any(seq.request.drafters for seq in seqs)

    def keeps_plain(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> bool:
        """Return whether the step after an in-flight plain step should be plain, too, given late free drafts."""
        return not any(budget.nodes for budget in self.choose_draft_lengths(seqs, free_drafts))

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Return the drafts to verify, some of them cut or dropped."""
        return drafts

    def observe(self, results: list[StepResult], times: StepTimes) -> None:  # noqa: B027 - a fixed one learns nothing
        """Learn from the results and times of a step."""

    def learns_from(self, seq: Sequence) -> bool:
        """Return whether drafters should observe this step: not without drafters, nor if they were not polled."""
        return bool(seq.request.drafters)

    def skip_reason(self, seq: Sequence) -> str:
        """Return why a sequence has no draft in this step, as the value of a metric label."""
        return ""

    @cached_property
    def decisions(self) -> DecisionLog:
        """What was decided and why; it stays empty unless a controller records it."""
        return DecisionLog()

    def plain_seconds(self, batch: int, context: int) -> float | None:
        """Return the expected seconds of a plain step with `context` cached tokens in all, or None if unknown."""
        return None

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - a fixed one keeps nothing
        """Drop the state of a finished sequence."""


class FixedController(Controller):
    """Gives every sequence the same number of draft tokens, fewer near its end or by the request's own limit."""

    def __init__(self, num_tokens: int, max_depth: int = 0) -> None:
        """`max_depth` above 0 asks for trees of that depth."""
        self.num_tokens, self.max_depth = num_tokens, max_depth

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        return [self._budget(seq, next(iter(seq.request.drafters), "")) for seq in seqs]

    def _budget(self, seq: Sequence, drafter: str) -> Budget:
        choice = seq.request.speculation
        if not seq.request.drafters or not seq.is_decoding:
            return Budget(0, drafter)
        wanted = self.num_tokens if choice.max_draft is None else min(self.num_tokens, choice.max_draft)
        depth = max(0, min(self.max_depth or wanted, seq.remaining_tokens - 1))  # the step adds the target's own token
        return Budget(wanted if self.max_depth and depth else min(wanted, depth), drafter, max_depth=depth)
