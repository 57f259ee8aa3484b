"""A stage whose clock is a function: what a bench makes of times that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.bench.measure import MeasureJob, TimedOutput, Variant
from foretell.bench.prompt import BenchPrompt
from foretell.bench.settings import BenchSettings
from foretell.config import SpeculationConfig
from foretell.sampling_params import SamplingParams

TEXT = tuple(range(11))  # ten tokens after the first


class FakeBackend:
    """Says how long an arm takes for a token of a job, and what it writes."""

    def __init__(
        self,
        seconds: Callable[[str, MeasureJob, int], float] = lambda variant, job, time: 1.0,
        tokens: Callable[[str, MeasureJob], tuple[int, ...]] = lambda variant, job: TEXT,
        steps: int = len(TEXT),
    ) -> None:
        self.seconds, self.tokens, self.steps = seconds, tokens, steps
        self.log: list[tuple[str, str]] = []  # arm and item, in the order they were written
        self.refreshed: list[int] = []  # outputs generated before each reset
        self.too_long: set[str] = set()
        self.stop_after: int | None = None

    def reset(self, variants: Sequence[Variant]) -> None:
        self.refreshed.append(len(self.log))

    def fits(self, item: BenchPrompt, settings: BenchSettings) -> bool:
        return item.id not in self.too_long

    def prepare(self, item: BenchPrompt, temperature: float | None, settings: BenchSettings) -> list[MeasureJob]:
        params = SamplingParams(temperature=temperature or 0.0)
        return [
            MeasureJob(item.id, item.task, turn, (1,), params, item.prediction) for turn in range(len(item.turns) + 1)
        ]

    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        if len(self.log) == self.stop_after:
            raise KeyboardInterrupt
        time = sum(logged == (variant.name, job.prompt_id) for logged in self.log)
        self.log.append((variant.name, job.prompt_id))
        tokens = self.tokens(variant.name, job)
        decoding = self.seconds(variant.name, job, time) * (len(tokens) - 1)
        steps = len(tokens) if variant.name == "plain" else self.steps
        return TimedOutput(
            tokens, steps, decoding, decoding + 1.0, draft_seconds=0.25 * decoding, target_seconds=0.5 * decoding
        )

    def decode(self, tokens: Sequence[int]) -> list[str]:
        return [f"<{token}>" for token in tokens]


def variants(*names: str) -> list[Variant]:
    return [
        Variant(name, SpeculationConfig(drafter="prediction" if name == "prediction" else "ngram")) for name in names
    ]


def items(**tasks: int) -> list[BenchPrompt]:
    """So many items of each task."""
    return [BenchPrompt(f"{task}-{i}", task) for task, count in tasks.items() for i in range(count)]


def ignore_progress(done: int, total: int, what: str) -> None:
    """For runs whose progress is not the point."""
