"""Arms that take turns in one run: what the machine does to one of them it does to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from foretell.config import SpeculationConfig
from foretell.params import SamplingParams

from .item import Item
from .plan import Plan

T = TypeVar("T")

Watch = Callable[[int, int, str], None]  # texts written, texts to write, what is being written


@dataclass(frozen=True)
class Arm:
    """One way to write; the arms of a run differ by their speculation."""

    name: str
    speculation: SpeculationConfig

    @property
    def reads_prediction(self) -> bool:
        """Whether it may use the text that a request expects."""
        return bool({"prediction", "auto", "mix"} & set(self.speculation.drafter.split(",")))

    def applies_to(self, job: Job) -> bool:
        """A drafter of predictions has nothing to say where there is none."""
        return self.speculation.drafter != "prediction" or job.prediction is not None


PLAIN = Arm("plain", SpeculationConfig(drafter="none"))


@dataclass(frozen=True)
class Job:
    """One text that every arm writes."""

    item: str
    task: str
    turn: int
    prompt: tuple[int, ...]
    params: SamplingParams
    prediction: str | None = None


@dataclass(frozen=True)
class Written:
    """What became of a job. Times are seconds by the wall clock."""

    tokens: tuple[int, ...]
    steps: int
    decoding: float  # from the first token to the last
    whole: float  # from asking to the end; of it:
    drafting: float  # in the drafter
    running: float  # in the target's forwards and their judgement
    failures: int = 0  # steps whose guesses were lost because the drafter failed
    promised: bool = True  # whether the text must be the one that plain decoding gives

    @property
    def a_token(self) -> float | None:
        """Seconds of decoding for one token; the first belongs to the prompt."""
        later = len(self.tokens) - 1
        return self.decoding / later if later > 0 and self.decoding > 0 else None


@dataclass(frozen=True)
class Sample:
    """A job as one arm did it in one round."""

    job: Job
    temperature: float | None
    round: int
    arm: str
    written: Written


class Stage(Protocol):
    """Where arms write."""

    def refresh(self, arms: Sequence[Arm]) -> None:
        """Make every arm ready and warm, with nothing learnt."""

    def fits(self, item: Item, plan: Plan) -> bool:
        """Whether an item can be written at all."""

    def prepare(self, item: Item, temperature: float | None, plan: Plan) -> list[Job]:
        """What is to be written for an item, with all that should not be measured done."""

    def write(self, arm: Arm, job: Job) -> Written:
        """Do a job and take the time."""


def rotated(arms: Sequence[T], by: int) -> list[T]:
    """A B C, then B C A, then C A B: nobody is always first, or always behind the same one."""
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


def measure(
    stage: Stage, arms: Sequence[Arm], items: Sequence[Item], plan: Plan, samples: list[Sample], watch: Watch
) -> None:
    """Write everything; `samples` grows as texts are finished, so that a run that is stopped leaves what it has.

    Arms start each pass over the items with nothing learnt: one that remembers finished texts would otherwise meet
    in the second round what it wrote in the first.
    """
    done, total = 0, plan.rounds * len(plan.temperatures) * len(items)
    for number in range(plan.rounds):
        for temperature in plan.temperatures:
            stage.refresh(arms)
            for place, item in enumerate(items):
                watch(done, total, f"{item.task}, round {number + 1}")
                for job in stage.prepare(item, temperature, plan):
                    for arm in rotated([arm for arm in arms if arm.applies_to(job)], place + number):
                        samples.append(Sample(job, temperature, number, arm.name, stage.write(arm, job)))
                done += 1
    watch(done, total, "done")
