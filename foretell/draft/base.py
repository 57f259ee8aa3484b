"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from foretell.types import Budget, Draft, Outcome, Sequence


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time, never correctness."""

    name: str = ""
    taps: tuple[int, ...] = ()  # layers of the target whose states it wants to observe
    draws: bool = False  # whether its guesses are drawn at random where the request samples
    gives_probability: bool = False  # whether a guess comes with the probability it was made with
    free: bool = False  # whether a guess costs next to nothing, so that it may be asked for and not be used
    wants_top: int = 0  # how many of the target's likeliest tokens it wants to observe after each row

    @abstractmethod
    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """For each sequence a draft of at most its budget; an empty draft is always allowed."""

    def observe(self, outcomes: list[Outcome]) -> None:  # noqa: B027 - most drafters learn nothing
        """What the target made of a step, whoever drafted it."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - most drafters keep nothing
        """`seq` has left: drop what was kept for it."""

    def offers(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        """For each sequence what would be guessed for next to nothing, by drafter: to decide with before a step."""
        return [{}] * len(seqs)

    @property
    def memory(self) -> int:
        """Bytes of weights and cache it keeps."""
        return 0

    @property
    def arms(self) -> tuple[str, ...]:
        """Names a budget may call it by."""
        return (self.name,)


class NoDrafter(Drafter):
    """Plain decoding."""

    name = "none"

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft()] * len(seqs)
