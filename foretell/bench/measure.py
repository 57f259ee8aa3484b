"""Arms that take turns in one run: what the machine does to one of them it does to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol, TypeVar

from foretell.bench.latency import AcceptanceByDepth
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams

SHORTEST = 16  # tokens; among several, what ends sooner leaves the others alone


def packs(items: Sequence[BenchPrompt], batch: int, plan: Plan) -> list[list[BenchPrompt]]:
    """Items of one task side by side, so many at once; where there are too few they are asked again in other words."""
    if batch == 1:
        return [[item] for item in items]
    found: list[list[BenchPrompt]] = []
    for task in dict.fromkeys(item.task for item in items):
        group = [item for item in items if item.task == task]
        count = -(-len(group) // batch) * batch
        asked = [long_enough(item, plan) for item in variations(group, count)]
        found += [asked[i : i + batch] for i in range(0, count, batch)]
    return found


def side_by_side(prepared: Sequence[Sequence[MeasureJob]]) -> list[MeasureJob]:
    """Turn by turn one job that has the others of the pack beside it."""
    turns = [[job for job in turn if job is not None] for turn in zip_longest(*prepared)]
    return [replace(first, beside=tuple(others)) if others else first for first, *others in turns]


def variations(items: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """So many of them; where there are fewer they are asked again, in other words, so that no two texts are one."""
    return [again(items[i % len(items)], i // len(items)) for i in range(count)]


def again(item: BenchPrompt, time: int) -> BenchPrompt:
    """An item in other words; the first time in its own."""
    if not time:
        return item
    name = f"{item.id}, again {time}"
    if item.text is not None:
        return replace(item, id=name, text=f"({time + 1})\n\n{item.text}")
    *before, last = item.messages
    last = {**last, "content": f"{last['content']}\n\n(Answer number {time + 1}.)"}
    return replace(item, id=name, messages=(*before, last))


def long_enough(item: BenchPrompt, plan: Plan) -> BenchPrompt:
    """One whose text does not end before it can be timed."""
    shortest = min(SHORTEST, item.max_tokens, plan.max_tokens or SHORTEST)
    return replace(item, sampling={"min_tokens": shortest, **item.sampling})


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


Batch = tuple[MeasureJob, ...]


@dataclass(frozen=True)
class BatchResult:
    """What became of a batch."""

    texts: tuple[tuple[int, ...], ...]
    steps: int  # forwards that gave a text a token, summed over texts
    timed: int  # tokens written while the clock ran
    seconds: float  # from when the last of them had its first token to the end of all
    failures: int = 0  # steps whose guesses were lost because the drafter failed

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def a_token(self) -> float:
        """Seconds of decoding for one token of any of the texts."""
        return self.seconds / self.timed


class BatchBackend(Protocol):
    """Where arms write batches."""

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        """What is to be written, with all that should not be measured done."""

    def refresh(self, arms: Sequence[Variant]) -> None:
        """Make every arm ready for a round; what its controller has learnt stays."""

    def write(self, arm: Variant, batch: Batch) -> BatchResult:
        """Write a batch and take the time."""


ADAPT = ("auto", "mix")  # these find out how far to guess
NEED_A_MODEL = ("model", "eagle", "block", "medusa", "mtp", "distilled")


def arms_of(names: Sequence[str], nodes: Sequence[int], base: SpeculationConfig) -> list[Variant]:
    """An arm for each drafter and number of tokens guessed; `a+b` is both behind one, which adapts."""
    arms: dict[str, Variant] = {}
    for name in names:
        if name in ("none", PLAIN.name):
            raise RequestError("drafters", f"{name} is what the others are compared with; leave it out")
        adapts = name in ADAPT or "+" in name
        for count in (None,) if adapts else nodes:
            label = name if adapts or len(nodes) == 1 else f"{name}, {count} tokens"
            arms[label] = Variant(label, replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count))
    return list(arms.values())


def grid_of(names: Sequence[str], nodes: Sequence[int | None], base: SpeculationConfig) -> list[Variant]:
    """Every drafter with every number of tokens guessed; None lets it find out how many."""
    arms: list[Variant] = []
    for name, count in itertools.product(names, dict.fromkeys(nodes)):
        config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count)
        if config.budget == 0 or name == PLAIN.name:
            raise RequestError("drafter", "is compared with plain decoding; name one that guesses")
        length = "" if len(nodes) == 1 else ", adaptive" if count is None else f", {count} tokens"
        arms.append(Variant(f"{name}{length}", config))
    if not arms:
        raise RequestError("drafter", "is empty; name one that guesses")
    return arms


def default_names(kinds: Iterable[str], layers: int, items: Sequence[BenchPrompt]) -> list[str]:
    """Every drafter that needs no other model and has something to go by; where a number is wanted, one that fits."""
    examples = {"exit": [f"exit:{max(1, layers // 2)}"], "self": ["self:int8", "self:int4"]}
    left_out = set(NEED_A_MODEL)
    if all(item.prediction is None for item in items):
        left_out.add("prediction")
    return [name for kind in kinds if kind not in left_out for name in examples.get(kind, [kind])] + ["auto"]
