"""What speculation did, for one text and for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from foretell.types import TARGET, StepResult, StepTimes
from foretell.verify.rules import LOSSLESS


@dataclass
class DrafterCount:
    """Guesses of one drafter."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class Speculation:
    """The record of one text. `steps`: forwards of the target that gave it a token; plain has steps == tokens."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rule: str = "match"
    by_drafter: dict[str, DrafterCount] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)  # for each token its drafter, or TARGET

    @property
    def accepted_per_step(self) -> float:
        """Mean tokens a step yields, the target's own included; 1 is plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def lossless(self) -> bool:
        """Whether the text, or its distribution, is the target's own."""
        return self.rule in LOSSLESS or self.drafted == 0

    def observe(self, outcome: StepResult, written_by: tuple[str, ...]) -> None:
        """Count one step, and note who proposed its tokens."""
        self.count(outcome)
        self.origins += written_by

    def count(self, outcome: StepResult) -> None:
        """Count one step."""
        if outcome.verify_result is None:
            return
        self.steps += 1
        self.tokens += len(outcome.new_tokens)
        draft = outcome.draft
        if not draft.parents:
            return
        if draft.origins is None:
            self._count(draft.source, len(draft.parents), outcome.num_accepted)
            return
        stood = outcome.verify_result.accepted_path[: outcome.num_accepted]
        for name in dict.fromkeys(draft.origins):
            mine = [draft.origins[node] for node in stood].count(name)
            self._count(name, draft.origins.count(name), mine)

    def _count(self, source: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        count = self.by_drafter.get(source)
        if count is None:
            count = self.by_drafter[source] = DrafterCount()
        count.drafted += drafted
        count.accepted += accepted

    @classmethod
    def total(cls, records: Iterable[Speculation]) -> Speculation:
        """The sum over several texts."""
        whole = cls()
        for record in records:
            whole.rule = record.rule
            whole.steps += record.steps
            whole.tokens += record.tokens
            whole.origins += record.origins
            for source, count in record.by_drafter.items():
                whole._count(source, count.drafted, count.accepted)
        return whole


def origins(outcome: StepResult) -> tuple[str, ...]:
    """Who proposed each token that entered the text."""
    accepted, draft = outcome.num_accepted, outcome.draft
    path = () if outcome.verify_result is None else outcome.verify_result.accepted_path[:accepted]
    guessed = (draft.source,) * accepted if draft.origins is None else tuple(draft.origins[node] for node in path)
    return guessed + (TARGET,) * (len(outcome.new_tokens) - accepted)


@dataclass
class Stats:
    """Totals of an engine since it started."""

    forwards: int = 0
    rows: int = 0
    cached_prompt_tokens: int = 0
    drafter_failures: int = 0  # steps whose guesses were left out because the drafter failed
    drafting_seconds: float = 0.0
    running_seconds: float = 0.0  # the target's forwards and their judgement
    speculation: Speculation = field(default_factory=Speculation)

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:
        """Count one step of the whole batch."""
        self.forwards += 1
        self.drafting_seconds += times.draft_seconds
        self.running_seconds += times.target_seconds
        for outcome in outcomes:
            self.rows += outcome.scheduled.num_new_tokens + len(outcome.draft)
            self.speculation.count(outcome)
