"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from foretell.types import Budget, Draft, Sequence, StepResult

from .backoff import Supervisor


class Drafter(ABC):
    """Guesses how sequences go on. A wrong guess costs time, never correctness."""

    name: str = ""
    hidden_layers: tuple[int, ...] = ()  # layers of the target whose states it wants to observe
    draws: bool = False  # whether its guesses are drawn at random where the request samples
    gives_probability: bool = False  # whether a guess comes with the probability it was made with
    grows: bool = False  # whether it makes trees of budgets that have more nodes than depth
    whole: bool = False  # whether all levels of a draft are made before any is looked at: one that is cut costs as much
    draws_whole: bool = True  # whether that is so, too, for drafts that are judged by what they were drawn from
    unseen_on: str = ""  # the device that it leaves its guesses on, where a budget says that nobody has to see them
    free: bool = False  # whether a guess costs next to nothing, so that it may be asked for and not be used
    reads: bool = False  # whether it has to read a text itself before it can guess
    cost_share: float = 0.3  # what a node should cost, of a plain step, before it was ever measured
    prior: float = 0.5  # how often a guess should stand, before it ever guessed
    stands_back: bool = False  # whether it need not show what it would guess where another free drafter is sure
    supervises: bool = False  # whether it calls other drafters through its supervisor and validates their drafts
    supervisor: Supervisor | None = None  # counts its failures; the engine sets it
    top_k: int = 0  # how many of the target's likeliest tokens it wants to observe after each row

    @abstractmethod
    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """For each sequence a draft of at most its budget; an empty draft is always allowed."""

    def prepare(self, seqs: list[Sequence]) -> None:  # noqa: B027 - most drafters have nothing to do
        """These texts are about to be written, and the host has time while a device reads them: do what guesses for
        them would else wait for. Nobody has to call it."""

    def update_kv(self, outcomes: list[StepResult]) -> None:  # noqa: B027 - most drafters keep nothing beside the target
        """What a step ran, of every text and before its pages are offered to others; for who has `taps`."""

    def observe(self, outcomes: list[StepResult]) -> None:  # noqa: B027 - most drafters learn nothing
        """What the target made of a step, whoever drafted it."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - most drafters keep nothing
        """`seq` has left: drop what was kept for it."""

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        """For each sequence what would be guessed for next to nothing, by drafter: to decide with before a step."""
        if not self.free:
            return [{}] * len(seqs)
        drafts = self.propose(seqs, [Budget(nodes)] * len(seqs))
        return [{self.name: draft} if may_be_shown(draft) else {} for draft in drafts]

    @property
    def memory(self) -> int:
        """Bytes of weights and cache it keeps."""
        return 0

    @property
    def is_ready(self) -> bool:
        """Whether it can guess now; one whose weights are away cannot."""
        return True

    def wake(self) -> None:  # noqa: B027 - most are always here
        """Come back in the background, where its weights are away."""

    @property
    def unavailable(self) -> frozenset[str]:
        """Of the drafters a request may ask for, those that cannot draft now."""
        resting = frozenset(name for name, arm in self.drafters.items() if not arm.is_ready)
        return resting if self.supervisor is None else resting | self.supervisor.disabled

    def request_load(self, name: str) -> None:
        """One that is away would be of use again."""
        self.drafters[name].wake()

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The drafters a request may ask for; of a single one itself."""
        return {self.name: self}

    @property
    def default_drafters(self) -> tuple[str, ...]:
        """Those a request gets that asks for none."""
        return tuple(self.drafters)


def may_be_shown(draft: Draft) -> bool:
    """Whether a decision may be made with a guess in sight: not with one that was drawn, which would be a bias."""
    return len(draft) > 0 and not any(draft.sampled or ())


class NoDrafter(Drafter):
    """Plain decoding."""

    name = "none"

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft()] * len(seqs)

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        return {}


class Wrapper(Drafter):
    """Stands before another drafter and is like it in all it does not change."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.hidden_layers, self.top_k = inner, inner.name, inner.hidden_layers, inner.top_k
        self.draws, self.gives_probability, self.grows = inner.draws, inner.gives_probability, inner.grows
        self.whole, self.draws_whole = inner.whole, inner.draws_whole
        self.supervises, self.supervisor = inner.supervises, inner.supervisor

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return self.inner.propose(seqs, budgets)

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        return self.inner.free_drafts(seqs, nodes)

    def prepare(self, seqs: list[Sequence]) -> None:
        self.inner.prepare(seqs)

    def update_kv(self, outcomes: list[StepResult]) -> None:
        self.inner.update_kv(outcomes)

    def observe(self, outcomes: list[StepResult]) -> None:
        self.inner.observe(outcomes)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)

    @property
    def memory(self) -> int:
        return self.inner.memory

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        return self.inner.drafters

    @property
    def default_drafters(self) -> tuple[str, ...]:
        return self.inner.default_drafters
