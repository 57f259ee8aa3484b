"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from foretell.types import Budget, Draft, Outcome, Sequence


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time, never correctness."""

    name: str = ""
    taps: tuple[int, ...] = ()  # layers of the target whose states it wants to observe
    draws: bool = False  # whether its guesses are drawn at random where the request samples
    gives_probability: bool = False  # whether a guess comes with the probability it was made with

    @abstractmethod
    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """For each sequence a draft of at most its budget; an empty draft is always allowed."""

    def observe(self, outcomes: list[Outcome]) -> None:  # noqa: B027 - most drafters learn nothing
        """What the target made of a step, whoever drafted it."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - most drafters keep nothing
        """`seq` has left: drop what was kept for it."""

    @property
    def memory(self) -> int:
        """Bytes of weights and cache it keeps."""
        return 0


class NoDrafter(Drafter):
    """Plain decoding."""

    name = "none"

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft()] * len(seqs)
