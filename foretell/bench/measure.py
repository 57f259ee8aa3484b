"""Arms that take turns in one run: what the machine does to one of them it does to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from foretell.config import SpeculationConfig
from foretell.sampling_params import SamplingParams

from .acceptance_by_depth import AcceptanceByDepth
from .batching import packs, side_by_side
from .plan import Plan
from .prompt import BenchPrompt

T = TypeVar("T")

Watch = Callable[[int, int, str], None]  # texts written, texts to write, what is being written


@dataclass(frozen=True)
class Variant:
    """One way to write; the arms of a run differ by their speculation."""

    name: str
    speculation: SpeculationConfig

    @property
    def reads_prediction(self) -> bool:
        """Whether it may use the text that a request expects."""
        return bool({"prediction", "auto", "mix"} & set(self.speculation.drafter.split(",")))

    def applies_to(self, job: MeasureJob) -> bool:
        """A drafter of predictions has nothing to say where there is none."""
        return self.speculation.drafter != "prediction" or any(each.prediction is not None for each in job.all)


PLAIN = Variant("plain", SpeculationConfig(drafter="none"))


@dataclass(frozen=True)
class MeasureJob:
    """One text that every arm writes, with those that are written beside it."""

    item: str
    task: str
    turn: int
    prompt: tuple[int, ...]
    params: SamplingParams
    prediction: str | None = None
    beside: tuple[MeasureJob, ...] = ()

    @property
    def all(self) -> tuple[MeasureJob, ...]:
        return (self, *self.beside)

    @property
    def batch(self) -> int:
        """Texts at once."""
        return 1 + len(self.beside)


@dataclass(frozen=True)
class TimedOutput:
    """What became of a job. Times are seconds by the wall clock; tokens of several texts stand end to end."""

    tokens: tuple[int, ...]
    steps: int
    decoding: float  # from the first token, where several texts are written the last of their first ones, to the end
    whole: float  # from asking to the end; of it:
    drafting: float  # in the drafter
    running: float  # in the target's forwards and their judgement
    failures: int = 0  # steps whose guesses were lost because the drafter failed
    promised: bool = True  # whether the text must be the one that plain decoding gives
    timed: int | None = None  # tokens that came while decoding was timed; None: all but the first
    pace: tuple[tuple[float, int], ...] = ()  # for each of those steps and texts: its seconds, the tokens it brought
    places: AcceptanceByDepth = AcceptanceByDepth()
    origins: tuple[str, ...] = ()  # for each token who proposed it
    lengths: tuple[int, ...] = ()  # tokens of each text, where there are several

    @property
    def a_token(self) -> float | None:
        """Seconds of decoding for one token; the first belongs to the prompt."""
        later = len(self.tokens) - 1 if self.timed is None else self.timed
        return self.decoding / later if later > 0 and self.decoding > 0 else None


@dataclass(frozen=True)
class Sample:
    """A job as one arm did it in one round."""

    job: MeasureJob
    temperature: float | None
    round: int
    arm: str
    written: TimedOutput


class Backend(Protocol):
    """Where arms write."""

    def refresh(self, arms: Sequence[Variant]) -> None:
        """Make every arm ready and warm, with nothing learnt."""

    def fits(self, item: BenchPrompt, plan: Plan) -> bool:
        """Whether an item can be written at all."""

    def prepare(self, item: BenchPrompt, temperature: float | None, plan: Plan) -> list[MeasureJob]:
        """What is to be written for an item, with all that should not be measured done."""

    def write(self, arm: Variant, job: MeasureJob) -> TimedOutput:
        """Do a job and take the time."""

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The words of each token."""


def rotated(arms: Sequence[T], by: int) -> list[T]:
    """A B C, then B C A, then C A B: nobody is always first, or always behind the same one."""
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


def measure(
    stage: Backend,
    arms: Sequence[Variant],
    items: Sequence[BenchPrompt],
    plan: Plan,
    samples: list[Sample],
    watch: Watch,
) -> None:
    """Write everything; `samples` grows as texts are finished, so that a run that is stopped leaves what it has.

    Arms start each pass over the items with nothing learnt: one that remembers finished texts would otherwise meet
    in the second round what it wrote in the first.
    """
    work = {batch: packs(items, batch, plan) for batch in plan.batches}
    done, total = 0, plan.rounds * len(plan.temperatures) * sum(map(len, work.values()))
    for number, temperature, batch in itertools.product(range(plan.rounds), plan.temperatures, plan.batches):
        stage.refresh(arms)
        for place, pack in enumerate(work[batch]):
            watch(done, total, f"{pack[0].task}, round {number + 1}")
            for job in side_by_side([stage.prepare(item, temperature, plan) for item in pack]):
                for arm in rotated([arm for arm in arms if arm.applies_to(job)], place + number):
                    samples.append(Sample(job, temperature, number, arm.name, stage.write(arm, job)))
            done += 1
    watch(done, total, "done")
