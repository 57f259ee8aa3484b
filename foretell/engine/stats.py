"""Speculation statistics of one sequence and of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from foretell.types import TARGET, StepResult, StepTimes
from foretell.verify.rules import LOSSLESS


@dataclass
class DrafterCount:
    """Draft tokens of one drafter."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpeculationStats:
    """Statistics of one sequence. `steps` counts target forwards that gave it a token; plain has steps == tokens."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rule: str = "match"
    by_drafter: dict[str, DrafterCount] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)  # for each token its drafter, or TARGET

    @property
    def accepted_per_step(self) -> float:
        """Return the mean output tokens per step, including the target's own; 1 is plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def lossless(self) -> bool:
        """Return whether the output, or its distribution, is the target's own."""
        return self.rule in LOSSLESS or self.drafted == 0

    def observe(self, result: StepResult, origins: tuple[str, ...]) -> None:
        """Count one step and record which drafter proposed its tokens."""
        self.count(result)
        self.origins += origins

    def count(self, result: StepResult) -> None:
        """Add the step of one sequence; prefill steps have no verification and are left out."""
        if result.verify_result is None:
            return
        self.steps += 1
        self.tokens += len(result.new_tokens)
        draft = result.draft
        if not draft.parents:
            return
        if draft.origins is None:
            self._count(draft.source, len(draft.parents), result.num_accepted)
            return
        accepted = result.verify_result.accepted_path[: result.num_accepted]
        for name in dict.fromkeys(draft.origins):
            num_accepted = [draft.origins[node] for node in accepted].count(name)
            self._count(name, draft.origins.count(name), num_accepted)

    def _count(self, source: str, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        count = self.by_drafter.get(source)
        if count is None:
            count = self.by_drafter[source] = DrafterCount()
        count.drafted += drafted
        count.accepted += accepted

    @classmethod
    def total(cls, records: Iterable[SpeculationStats]) -> SpeculationStats:
        """Return the sum over several sequences."""
        total = cls()
        for record in records:
            total.rule = record.rule
            total.steps += record.steps
            total.tokens += record.tokens
            total.origins += record.origins
            for source, count in record.by_drafter.items():
                total._count(source, count.drafted, count.accepted)
        return total


def token_origins(result: StepResult) -> tuple[str, ...]:
    """Return for each new token the drafter that proposed it, or TARGET."""
    accepted, draft = result.num_accepted, result.draft
    path = () if result.verify_result is None else result.verify_result.accepted_path[:accepted]
    drafted = (draft.source,) * accepted if draft.origins is None else tuple(draft.origins[node] for node in path)
    return drafted + (TARGET,) * (len(result.new_tokens) - accepted)


@dataclass
class Stats:
    """Totals of an engine since it started."""

    forwards: int = 0
    rows: int = 0
    cached_prompt_tokens: int = 0
    drafter_failures: int = 0  # calls of a drafter that failed; each cost its drafts and no request
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # forward passes of the target, with verification
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        """Count one step of the batch."""
        self.forwards += 1
        self.draft_seconds += times.draft_seconds
        self.target_seconds += times.target_seconds
        for result in results:
            self.rows += result.scheduled.num_new_tokens + len(result.draft)
            self.speculation.count(result)
