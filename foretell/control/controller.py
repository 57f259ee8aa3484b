"""How many nodes each sequence may draft in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from foretell.control.acceptance_tracker import AcceptanceObserver
from foretell.control.decision_log import Decision
from foretell.control.settings import ControllerSettings, Presence
from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes

FreeDrafts = Mapping[int, Mapping[str, Draft]]  # by sequence and drafter


class Controller(ABC):
    """Decides before the step, from the past alone, so that it never biases a sample."""

    allows_early_start: bool = (
        True  # whether a step may be decided before anybody asks for it, when the last has written
    )

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        """Whose free guesses it wants to see before it decides, and of how many nodes."""
        return [], 0

    @abstractmethod
    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        """A budget for each sequence; 0 nodes is a normal answer. `offers` are the free guesses it asked for."""

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        """Whether guesses in the next step are unlikely: it may begin before this one's tokens are known."""
        return not any(seq.request.drafters for seq in seqs)

    def keeps_plain(self, seqs: list[Sequence], offers: FreeDrafts) -> bool:
        """A look that comes late, at a step that runs already and guesses nothing: whether the next should not, too."""
        return not any(budget.nodes for budget in self.choose_draft_lengths(seqs, offers))

    def trim(self, plan: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        """Cut drafts by their confidence."""
        return drafts

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:  # noqa: B027 - a fixed one learns nothing
        """What came of a step, and what it cost."""

    def learns_from(self, seq: Sequence) -> bool:
        """Whether drafters are to learn from what this step writes; not where nobody may guess, or nobody looked."""
        return bool(seq.request.drafters)

    def skip_reason(self, seq: Sequence) -> str:
        """Why it let nothing be guessed for a text in this step, in a word for a metric."""
        return ""

    @property
    def decision_counts(self) -> dict[Decision, int]:
        """Steps of texts since the start by (drafter, "drafted" or "skipped", reason), where that is counted."""
        return {}

    @property
    def speculation_state(self) -> tuple[bool, str]:
        """Whether guessing is on, and the words with which it was last switched."""
        return True, ""

    @property
    def num_switches(self) -> int:
        """How often guessing went off or on."""
        return 0

    def plain_seconds(self, batch: int, context: int) -> float | None:
        """What a step without drafts takes for `batch` texts with `context` tokens cached in all, where it is known."""
        return None

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - a fixed one keeps nothing
        """`seq` has left."""


class FixedController(Controller):
    """As many nodes each step as it was told, less where the request or its end says so."""

    def __init__(self, nodes: int, levels: int = 0) -> None:
        """`levels`: the longest branch; 0: as long as there are nodes."""
        self.nodes, self.levels = nodes, levels

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        return [self._budget(seq, next(iter(seq.request.drafters), "")) for seq in seqs]

    def _budget(self, seq: Sequence, arm: str) -> Budget:
        choice = seq.request.speculation
        if not seq.request.drafters or not seq.is_decoding:
            return Budget(0, arm)
        wanted = self.nodes if choice.max_draft is None else min(self.nodes, choice.max_draft)
        longest = max(0, min(self.levels or wanted, seq.remaining_tokens - 1))  # the step adds a token of its own
        return Budget(wanted if self.levels and longest else min(wanted, longest), arm, max_depth=longest)


class Always:
    """Of several drafters the one most of whose guesses should stand; who is away is called."""

    def __init__(
        self,
        arms: Mapping[str, DrafterTraits],
        settings: ControllerSettings,
        lessons: AcceptanceObserver,
        presence: Presence,
        call: Callable[[str], None],
    ) -> None:
        self.arms, self.settings, self.lessons = arms, settings, lessons
        self.presence, self.call = presence, call

    def budget(self, seq: Sequence, offered: Mapping[str, Draft], nodes: int, writers: int) -> Budget:
        """For one of `writers` texts, with what free drafters have for it; no nodes where nobody has any."""
        count = min(nodes, self.settings.cap(seq))
        away = self.presence.unavailable.intersection(seq.request.drafters)
        for arm in away:
            self.call(arm)
        here = [arm for arm in seq.request.drafters if arm not in away]
        arm = self.lessons.likeliest(seq, here, offered, count) if count else ""
        if not arm:
            return Budget()
        most = self.settings.tree_cap(seq, writers) if self.arms[arm].makes_trees else 0
        return Budget(most, arm, max_depth=count) if most > count else Budget(count, arm)
